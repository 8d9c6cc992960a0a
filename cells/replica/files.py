"""Safetensors files that many ranks write at once, each its own parts, and that are read in parts.

The format is a header with the place of each tensor, and then their bytes
(https://huggingface.co/docs/safetensors). One rank writes the headers; then every rank puts its
pieces where they belong through a memory map. So a file holds whole tensors, whatever the layout of
those who wrote it, and no process holds more than its own part of them. Its library can read parts,
and writes only whole files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from cells.replica.links import Piece

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ITEM = {"F32": 4, "BF16": 2}
_ALIGNMENT = 8


class Source(Protocol):
    """Tensors by name, read in parts."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, piece: Piece) -> Tensor: ...


class InMemory:
    """Tensors that are there already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, piece: Piece) -> Tensor:
        return self._tensors[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)


class Files:
    """Tensors of several files; a read takes no more from the disk than its piece.

    Raises:
        OSError, SafetensorError: a file is missing or damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._of: dict[str, Any] = {name: file for file in self._files for name in set(file.keys())}

    def names(self) -> set[str]:
        return set(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def read(self, piece: Piece) -> Tensor:
        part = self._of[piece.name].get_slice(piece.name)
        span = slice(piece.start, piece.stop)
        found: Tensor = part[span] if piece.dim == 0 else part[:, span]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._of.clear()
        self._files.clear()  # closes them: their maps must not outlive a folder that is replaced


@dataclass(frozen=True)
class Entry:
    """A tensor of a file that is to be written."""

    shape: tuple[int, ...]
    kind: str
    start: int
    """Of its bytes, from the beginning of the file."""


class Writer:
    """One file under way. All ranks make it with the same ``shapes``; one calls ``create``.

    Args:
        shapes: of all tensors, in the order of the file.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._path = path
        self._map: np.memmap[Any, np.dtype[np.uint8]] | None = None
        self._entries: dict[str, Entry] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        kind, at = _NAMES[dtype], 0
        for name, shape in shapes.items():
            nbytes = int(np.prod(shape, dtype=np.int64)) * _ITEM[kind]
            span = [at, at + nbytes]
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": span}
            at += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._head = struct.pack("<Q", len(text)) + text
        self._size = len(self._head) + at
        for name, shape in shapes.items():
            start = len(self._head) + header[name]["data_offsets"][0]
            self._entries[name] = Entry(shape, kind, start)

    def create(self) -> None:
        """Write the header and take the room; before any ``put``."""
        with open(self._path, "wb") as file:
            file.write(self._head)
            file.truncate(self._size)

    def put(self, piece: Piece, values: Tensor, name: str | None = None) -> None:
        """Put a part of a tensor in its place, in the number format of the file.

        Args:
            name: of the tensor in the file; that of the piece when left out.
        """
        entry = self._entries[name or piece.name]
        # numpy has no bfloat16: its bits are moved as they are.
        dtype = torch.bfloat16 if entry.kind == "BF16" else torch.float32
        plain = values.detach().to(dtype).cpu().contiguous()
        bits = plain.view(torch.int16) if entry.kind == "BF16" else plain
        values_of = bits.numpy()
        if self._map is None:
            self._map = np.memmap(self._path, np.uint8, "r+")
        stop = entry.start + int(np.prod(entry.shape, dtype=np.int64)) * values_of.itemsize
        whole = self._map[entry.start : stop].view(values_of.dtype).reshape(entry.shape)
        whole[(slice(None),) * piece.dim + (slice(piece.start, piece.stop),)] = values_of


def shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, most_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in order, cut into files of at most ``most_bytes``; a larger one has its own."""
    found: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not found or nbytes > room:
            found.append({})
            room = most_bytes
        found[-1][name] = shape
        room -= nbytes
    return found
