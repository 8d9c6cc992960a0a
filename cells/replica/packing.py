"""Documents packed into one row, with the places whose next token is wanted.

Flat, the documents lie one after the other. With shared prefixes the row is a forest: documents are
sorted by their ids, and each adds only what it does not have in common with the one before it. That
is every distinct prefix once, in the order of a walk that visits a token before what follows it.
A hidden state depends on the ids before it and on nothing else, so it does not matter whose
documents share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cells.replica.corpus import Document
from cells.replica.prefixes import shared_prefix, sort_key

T = TypeVar("T")
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chains:
    """A row cut into runs of tokens that follow each other; what attends to what.

    A chain continues the path that its ``contexts`` entry holds, and its tokens attend to that path
    and to the chain itself, causally. Shapes: ``bounds`` [chains + 1], from 0 to the row's tokens;
    each context [tokens before the chain]; ``ends`` [tokens]: where the tokens that follow from
    each one end, so that token q attends to token k where k <= q < ends[k].
    """

    bounds: Tensor
    contexts: tuple[Tensor, ...]
    ends: Tensor

    @property
    def shared(self) -> bool:
        """Whether some chain continues another one."""
        return any(len(context) for context in self.contexts)


@dataclass(frozen=True)
class PackedRow:
    """One row of documents without padding.

    Shapes: ``ids`` and ``positions`` [tokens]; ``before`` [targets]: index of the token before each
    target, several times where several tokens were drawn after it; ``labels`` [targets]: the
    target's id. Targets are in the order of the documents.
    """

    ids: Tensor
    positions: Tensor
    chains: Chains
    before: Tensor
    labels: Tensor
    target_counts: tuple[int, ...]
    """Targets of each document, in order."""


def pack(documents: Sequence[Document], *, share: bool = False) -> PackedRow:
    """Pack documents of (ids [n], targets [n]); with ``share``, common prefixes are there once.

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
    places, chains = _shared([ids for ids, _ in documents]) if share else _apart(documents)
    total = int(chains.bounds[-1])
    row, positions = np.empty(total, np.int64), np.empty(total, np.int64)
    before, labels = [], []
    for (ids, targets), place in zip(documents, places, strict=True):
        row[place] = ids
        positions[place] = np.arange(len(ids))
        at = np.flatnonzero(targets)
        before.append(place[at - 1])
        labels.append(ids[at].astype(np.int64))
    return PackedRow(
        ids=torch.from_numpy(row),
        positions=torch.from_numpy(positions),
        chains=chains,
        before=torch.from_numpy(np.concatenate(before)),
        labels=torch.from_numpy(np.concatenate(labels)),
        target_counts=tuple(len(at) for at in labels),
    )


def _apart(documents: Sequence[Document]) -> tuple[list[Index], Chains]:
    """Each document is a chain of its own."""
    bounds = np.cumsum([0, *(len(ids) for ids, _ in documents)])
    places = [np.arange(start, end) for start, end in pairwise(bounds)]
    none = torch.zeros(0, dtype=torch.long)
    ends = np.repeat(bounds[1:], np.diff(bounds))
    chains = Chains(torch.from_numpy(bounds), (none,) * len(documents), torch.from_numpy(ends))
    return places, chains


def _shared(documents: Sequence[npt.NDArray[np.int32]]) -> tuple[list[Index], Chains]:
    """Places of each document's tokens in the row, and the chains."""
    places: list[Index] = [np.zeros(0, np.int64)] * len(documents)
    bounds, contexts = [0], []
    last_ids, last = np.zeros(0, np.int32), np.zeros(0, np.int64)
    visited: list[tuple[Index, int]] = []
    for number in sorted(range(len(documents)), key=lambda n: sort_key(documents[n])):
        ids = documents[number]
        common = shared_prefix(last_ids, ids)
        new = len(ids) - common
        if new:
            bounds.append(bounds[-1] + new)
            contexts.append(torch.from_numpy(last[:common]))
        last_ids, last = ids, np.append(last[:common], np.arange(bounds[-1] - new, bounds[-1]))
        places[number] = last
        visited.append((last, bounds[-1]))
    ends = np.empty(bounds[-1], np.int64)
    for place, end in visited:  # whoever comes later reaches further
        ends[place] = end
    return places, Chains(torch.tensor(bounds), tuple(contexts), torch.from_numpy(ends))


def padded(row: PackedRow, tokens: int) -> PackedRow:
    """The row with tokens that nobody attends to and that predict nothing, up to ``tokens``."""
    before = len(row.ids)
    more = tokens - before
    if more <= 0:
        return row
    chains = row.chains
    return replace(
        row,
        ids=torch.cat((row.ids, row.ids.new_zeros(more))),
        positions=torch.cat((row.positions, torch.arange(more))),
        chains=Chains(
            torch.cat((chains.bounds, torch.tensor([tokens]))),
            (*chains.contexts, torch.zeros(0, dtype=torch.long)),
            torch.cat((chains.ends, torch.full((more,), tokens))),
        ),
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
