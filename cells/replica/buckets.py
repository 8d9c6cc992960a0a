"""Weights for an engine on the same machine, a bucket at a time, in memory that both have.

Every rank gives what it holds of a bucket's tensors to the leader, which puts whole HF tensors into
one shared block; what the engine is told is where that is. So nobody ever holds the model twice,
only a bucket of it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from cells.replica.errors import ReplicaError
from cells.replica.gradient import Answer
from cells.replica.links import Piece, hf_shapes, links
from cells.replica.place import Place
from cells.replica.policy import Policy
from cells.replica.weights import split, writes


class Buckets:
    """The bucket that an engine may be reading, if there is one."""

    def __init__(self) -> None:
        self._block: Tensor | None = None

    def share(self, policy: Policy, first: int, limit_bytes: int) -> Answer:
        """Put the tensors from number ``first`` on into shared memory, in place of the last ones.

        Args:
            limit_bytes: of the bucket, unless a single tensor is larger.

        Returns:
            version; next: number of the first tensor of the bucket after it, None after the last;
            payload: what SGLang reads the tensors from, base64.

        Raises:
            ReplicaError: there is no such tensor, or too little shared memory.
        """
        shapes = hf_shapes(policy.shape)
        names = _bucket(shapes, policy.flat.weights.itemsize, first, limit_bytes)
        after = first + len(names)
        self.drop()
        parts = _gathered(_own(policy, set(names)), policy.place)
        payload = ""
        if policy.place.rank == 0:
            wanted = {name: shapes[name] for name in names}
            self._block, tensors = _shared(wanted, policy.flat.weights.dtype, parts)
            payload = _handles(tensors)
        following = after if after < len(shapes) else None
        return {"version": policy.version, "next": following, "payload": payload}

    def drop(self) -> None:
        """Give the memory back; an engine that still reads keeps it until then."""
        self._block = None


def _bucket(
    shapes: dict[str, tuple[int, ...]], itemsize: int, first: int, limit_bytes: int
) -> list[str]:
    """Names from number ``first`` on, at least one, of no more bytes together than the limit."""
    names: list[str] = []
    filled = 0
    for name, size in list(shapes.items())[first:]:
        filled += torch.Size(size).numel() * itemsize
        if names and filled > limit_bytes:
            break
        names.append(name)
    if not names:
        raise ReplicaError(f"no tensor {first}: the policy has {len(shapes)}")
    return names


def _own(policy: Policy, names: set[str]) -> list[tuple[Piece, Tensor]]:
    """This rank's pieces of those tensors, but what a lower rank has too."""
    shape, place = policy.shape, policy.place
    weights = policy.flat.split(policy.flat.weights)
    return [
        (piece, part)
        for link in links(shape, place)
        if writes(link, place) and not names.isdisjoint(link.hf)
        for piece, part in zip(
            link.pieces(shape, place),
            split(weights[link.megatron].detach(), link, shape, place),
            strict=True,
        )
        if piece.name in names
    ]


def _gathered(own: list[tuple[Piece, Tensor]], place: Place) -> list[tuple[Piece, Tensor]]:
    """The pieces of all ranks, in the leader; nothing in the others."""
    if place.alone:
        return own
    here = [(piece, part.cpu()) for piece, part in own]
    everyone: list[Any] | None = [None] * place.layout.ranks if place.rank == 0 else None
    dist.gather_object(here, everyone)
    return [pair for one in everyone or () for pair in one]


def _shared(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, parts: Iterable[tuple[Piece, Tensor]]
) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """The block, and the tensors in it."""
    # The default hands open files over a socket of the process; an engine can't ask for them there.
    torch.multiprocessing.set_sharing_strategy("file_system")
    sizes = [torch.Size(size).numel() for size in shapes.values()]
    try:
        block = torch.empty(sum(sizes), dtype=dtype).share_memory_()
    except RuntimeError as error:
        raise ReplicaError(f"no shared memory for {sum(sizes)} numbers: {error}") from error
    whole = {
        name: flat.view(size)
        for (name, size), flat in zip(shapes.items(), block.split(sizes), strict=True)
    }
    for piece, part in parts:
        whole[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start).copy_(part)
    return block, list(whole.items())


def _handles(tensors: list[tuple[str, Tensor]]) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()
