"""Saving and restoring everything that the next update depends on, without pickle.

A state is a folder: ``state.safetensors`` (weights, both moments, the random state),
``state.json`` (format, version, optimizer step counts), and ``policy/``, the small files of the HF
directory. It is written aside and moved.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cells.replica.errors import ReplicaError
from cells.replica.policy import Policy

FORMAT = 1
_TENSORS = "state.safetensors"
_INDEX = "state.json"
_BESIDE = "policy"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(
    policy: Policy, *, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW with decoupled decay of matrices; norms are not decayed.

    torch's own, not Megatron's wrapper of it: that one asserts CUDA tensor types, and its state
    does not come back from a checkpoint on a CPU.
    """
    named = policy.flat.named.values()
    groups = [
        {"params": [p for p in named if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas)


def save_state(folder: Path, policy: Policy, optimizer: torch.optim.AdamW | None) -> None:
    """Write the state of a replica; what was at ``folder`` is replaced.

    Raises:
        ReplicaError: it can't be written; the old state is still there.
    """
    tensors: dict[str, Tensor] = {
        f"weights/{name}": weight for name, weight in policy.flat.split(policy.flat.weights).items()
    }
    tensors["random"] = torch.get_rng_state()
    steps: dict[str, float] = {}
    for name, parameter in policy.flat.named.items():
        state = optimizer.state.get(parameter) if optimizer is not None else None
        if state:
            steps[name] = float(state["step"])
            for moment in _MOMENTS:
                tensors[f"{moment}/{name}"] = state[moment]
    index = {"format": FORMAT, "version": policy.version, "optimizer_steps": steps}
    aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        (aside / _BESIDE).mkdir(parents=True)
        for name, data in policy.beside.items():
            (aside / _BESIDE / name).write_bytes(data)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside / _TENSORS)
        (aside / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        raise ReplicaError(f"{folder}: can't be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def policy_folder(folder: Path) -> Path:
    """Where a saved state keeps config.json and the tokenizer."""
    return folder / _BESIDE


@dataclass(frozen=True)
class SavedState:
    """A state that was read and fits the policy; nothing is changed before ``apply``."""

    version: int
    tensors: Mapping[str, Tensor]
    optimizer_steps: Mapping[str, float]

    def apply(self, policy: Policy, optimizer: torch.optim.AdamW | None) -> None:
        """Take weights, version and random state, and the moments where there is an optimizer.

        The optimizer must be fresh, and the gradient discarded.
        """
        named = policy.flat.named
        policy.commit({name: self.tensors[f"weights/{name}"] for name in named}, self.version)
        torch.set_rng_state(self.tensors["random"])
        if optimizer is None or not self.optimizer_steps:
            return
        for name, parameter in named.items():
            optimizer.state[parameter] = {
                "step": torch.tensor(self.optimizer_steps[name]),
                **{
                    moment: self.tensors[f"{moment}/{name}"].to(parameter.device, copy=True)
                    for moment in _MOMENTS
                },
            }


def read_state(folder: Path, policy: Policy) -> SavedState:
    """The state at ``folder``.

    Raises:
        ReplicaError: damaged, incomplete, of another format, or of a model of another shape.
    """
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ReplicaError(f"{folder}: the state can't be read: {error}") from error
    if index.get("format") != FORMAT:
        raise ReplicaError(f"{folder}: format {index.get('format')}, this version reads {FORMAT}")
    steps: dict[str, float] = index["optimizer_steps"]
    for name, parameter in policy.flat.named.items():
        for kind in ("weights", *(_MOMENTS if steps else ())):
            found = tensors.get(f"{kind}/{name}")
            if found is None or found.shape != parameter.shape:
                raise ReplicaError(f"{folder}: {kind} of {name} missing or of another shape")
    return SavedState(int(index["version"]), tensors, steps)
