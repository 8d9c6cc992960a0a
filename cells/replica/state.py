"""Saving and restoring everything that the next update depends on, without pickle.

A state is a folder: ``state.safetensors`` (weights and both moments, float32, each a whole tensor
by its HF name, so that any layout can read what another has written), ``random.safetensors``,
``state.json`` (format, version, number of optimizer steps), and ``policy/``, the small files of the
HF directory. It is written aside and moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cells.replica.agreement import new_folder, together
from cells.replica.errors import ReplicaError
from cells.replica.files import Files, Writer
from cells.replica.links import Link, Piece, hf_shapes, links
from cells.replica.optimizer import MOMENTS, Optimizer
from cells.replica.policy import Policy
from cells.replica.weights import join, split, writes

FORMAT = 2
_TENSORS = "state.safetensors"
_RANDOM = "random.safetensors"
_INDEX = "state.json"
_BESIDE = "policy"


def save_state(folder: Path, policy: Policy, optimizer: Optimizer | None) -> None:
    """Write the state of a replica, with the other ranks; what was at ``folder`` is replaced.

    Raises:
        ReplicaError: it can't be written; the old state is still there.
    """
    steps = 0.0 if optimizer is None else optimizer.steps
    kinds = ("weights", *MOMENTS) if steps else ("weights",)
    place, shape = policy.place, policy.shape
    shapes = {f"{kind}/{name}": size for kind in kinds for name, size in hf_shapes(shape).items()}
    aside = folder.with_name(f".{folder.name}-v{policy.version}")
    index = {"format": FORMAT, "version": policy.version, "optimizer_steps": steps}
    try:
        with new_folder(folder, place, aside):
            writer = Writer(aside / _TENSORS, shapes, torch.float32)
            with together(place):
                if place.rank == 0:
                    (aside / _BESIDE).mkdir()
                    for name, data in policy.beside.items():
                        (aside / _BESIDE / name).write_bytes(data)
                    save_file({"random": torch.get_rng_state()}, aside / _RANDOM)
                    (aside / _INDEX).write_text(json.dumps(index), encoding="utf-8")
                    writer.create()
            own = policy.flat.split(policy.flat.weights)
            failed: OSError | None = None
            for kind in kinds:
                for link in links(shape, place):
                    # Ranks gather one parameter at a time, also when this one can't write.
                    name = link.megatron
                    whole = own[name] if optimizer is None else optimizer.gathered(kind, name)
                    if writes(link, place) and failed is None:
                        try:
                            _put(writer, kind, link, whole, policy)
                        except OSError as error:
                            failed = error
            with together(place):
                if failed is not None:
                    raise failed
    except OSError as error:
        raise ReplicaError(f"{folder}: can't be written: {error}") from error


def policy_folder(folder: Path) -> Path:
    """Where a saved state keeps config.json and the tokenizer."""
    return folder / _BESIDE


@dataclass(frozen=True)
class SavedState:
    """A state that fits the policy; nothing is changed before ``apply``."""

    folder: Path
    version: int
    steps: float
    """Optimizer steps that the moments hold; 0 where there are no moments."""

    def apply(self, policy: Policy, optimizer: Optimizer | None) -> None:
        """Take weights, version and random state, and the moments where there is an optimizer.

        The optimizer must be fresh, and the gradient discarded. Each rank reads what it holds.
        """
        with Files([self.folder / _TENSORS]) as source:
            weights = dict(_read(source, "weights", policy))
            policy.commit(weights, self.version)
            torch.set_rng_state(load_file(self.folder / _RANDOM)["random"])
            if optimizer is None:
                return
            for name, whole in weights.items():
                optimizer.restore("weights", name, whole, self.steps)
            for moment in MOMENTS if self.steps else ():
                for name, whole in _read(source, moment, policy):
                    optimizer.restore(moment, name, whole, self.steps)


def read_state(folder: Path, policy: Policy) -> SavedState:
    """The state at ``folder``.

    Raises:
        ReplicaError: damaged, incomplete, of another format, or of a model of another shape.
    """
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        if index.get("format") != FORMAT:
            raise ReplicaError(
                f"{folder}: format {index.get('format')}, this version reads {FORMAT}"
            )
        load_file(folder / _RANDOM)
        with Files([folder / _TENSORS]) as source:
            there = {name: source.shape(name) for name in source.names()}
    except (OSError, ValueError, SafetensorError) as error:
        raise ReplicaError(f"{folder}: the state can't be read: {error}") from error
    steps = float(index["optimizer_steps"])
    for kind in ("weights", *(MOMENTS if steps else ())):
        for name, size in hf_shapes(policy.shape).items():
            if there.get(f"{kind}/{name}") != size:
                raise ReplicaError(f"{folder}: {kind} of {name} missing or of another shape")
    return SavedState(folder, int(index["version"]), steps)


def _put(writer: Writer, kind: str, link: Link, whole: Tensor, policy: Policy) -> None:
    parts = split(whole.detach(), link, policy.shape, policy.place)
    for piece, part in zip(link.pieces(policy.shape, policy.place), parts, strict=True):
        writer.put(piece, part, f"{kind}/{piece.name}")


def _read(source: Files, kind: str, policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of weights or a moment, by Megatron name."""
    shape, place = policy.shape, policy.place
    for link in links(shape, place):
        pieces = [
            Piece(f"{kind}/{piece.name}", piece.shape, piece.dim, piece.start, piece.stop)
            for piece in link.pieces(shape, place)
        ]
        yield link.megatron, join([source.read(piece) for piece in pieces], link, shape, place)
