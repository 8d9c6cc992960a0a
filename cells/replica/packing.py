"""Documents concatenated into one row, with the rows whose next token is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class PackedRow:
    """One row of documents without padding.

    Shapes: ``ids`` and ``positions`` [tokens], ``bounds`` [documents + 1] (int32, starting at 0),
    ``before`` [targets]: index of the token before each target, ``labels`` [targets]: its id.
    """

    ids: Tensor
    positions: Tensor
    bounds: Tensor
    before: Tensor
    labels: Tensor
    target_counts: tuple[int, ...]
    """Targets of each document, in order."""


def pack(
    documents: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]],
) -> PackedRow:
    """Concatenate documents of (ids [n], targets [n]).

    Raises:
        ValueError: no documents, an empty one, or a target at position 0, which nothing predicts.
    """
    if not documents:
        raise ValueError("a packed row needs at least one document")
    for ids, targets in documents:
        if not len(ids) or len(ids) != len(targets):
            raise ValueError(f"a document has {len(ids)} ids and {len(targets)} target marks")
        if targets[0]:
            raise ValueError("the first token of a document can't be a target")
    lengths = [len(ids) for ids, _ in documents]
    ids = np.concatenate([ids for ids, _ in documents]).astype(np.int64)
    at = np.flatnonzero(np.concatenate([targets for _, targets in documents]))
    return PackedRow(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        bounds=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        before=torch.from_numpy(at - 1),
        labels=torch.from_numpy(ids[at]),
        target_counts=tuple(int(np.count_nonzero(targets)) for _, targets in documents),
    )


def in_rows(items: Sequence[T], lengths: Sequence[int], most: int) -> list[list[T]]:
    """Items in order, cut into rows of at most ``most`` tokens; a longer one has its own row."""
    rows: list[list[T]] = []
    room = 0
    for item, length in zip(items, lengths, strict=True):
        if not rows or length > room:
            rows.append([])
            room = most
        rows[-1].append(item)
        room -= length
    return rows
