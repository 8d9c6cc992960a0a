"""Samples into micro-steps of at most a number of tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cells.replica.prefixes import shared_prefix, sort_key


@dataclass(frozen=True)
class SampleSize:
    """A sample and what it costs."""

    group: str
    """Query of its sealed group."""
    index: int
    tokens: int
    targets: int
    rank: int = 0
    """Place among the group's samples sorted by their ids."""
    shared: int = 0
    """Tokens at its start that the sample before it in that order begins with too."""

    @property
    def new_tokens(self) -> int:
        """What it adds to a row that holds the sample before it."""
        return self.tokens - self.shared


def measure_shared(
    sizes: Sequence[SampleSize], ids: Sequence[npt.NDArray[np.int32]]
) -> list[SampleSize]:
    """The sizes of one group's samples with their rank and what they share.

    Executions of a group share their instruction, and often much more: sharing is not limited to
    the trajectories of one execution.
    """
    found = list(sizes)
    last = np.zeros(0, np.int32)
    order = sorted(range(len(ids)), key=lambda number: sort_key(ids[number]))
    for rank, number in enumerate(order):
        shared = shared_prefix(last, ids[number])
        found[number] = replace(sizes[number], rank=rank, shared=shared)
        last = ids[number]
    return found


@dataclass(frozen=True)
class _Bundle:
    """Samples that stay together for what they share."""

    samples: tuple[SampleSize, ...]
    tokens: int
    """Distinct ones."""


def pack(samples: Sequence[SampleSize], budget: int) -> list[tuple[SampleSize, ...]]:
    """The fewest rows that a greedy balance finds, of about equal length; a shared prefix counts
    once in a row.

    The result depends on the set of samples only. Rows are concatenated, never padded, so equal
    lengths matter for replicas that work side by side, not for waste. A sample longer than
    ``budget`` has a row of its own.
    """
    order = sorted(_bundles(samples, budget), key=_longest_first)
    long = [bundle for bundle in order if bundle.tokens >= budget]
    short = order[len(long) :]
    rows = [bundle.samples for bundle in long]
    count = math.ceil(sum(bundle.tokens for bundle in short) / budget)
    while short:
        balanced = _balance(short, count)
        if all(sum(bundle.tokens for bundle in row) <= budget for row in balanced):
            return rows + [tuple(s for bundle in row for s in bundle.samples) for row in balanced]
        count += 1
    return rows


def _bundles(samples: Sequence[SampleSize], budget: int) -> list[_Bundle]:
    """Runs of samples that share, each cut where it would exceed the budget."""
    bundles: list[_Bundle] = []
    last: SampleSize | None = None
    for sample in sorted(samples, key=lambda one: (one.group, one.rank, one.index)):
        follows = last is not None and (last.group, last.rank + 1) == (sample.group, sample.rank)
        last = sample
        if follows and sample.shared and bundles[-1].tokens + sample.new_tokens <= budget:
            before = bundles[-1]
            bundles[-1] = _Bundle((*before.samples, sample), before.tokens + sample.new_tokens)
        else:
            bundles.append(_Bundle((sample,), sample.tokens))
    return bundles


def _longest_first(bundle: _Bundle) -> tuple[int, str, int]:
    return -bundle.tokens, bundle.samples[0].group, bundle.samples[0].index


def _balance(order: Sequence[_Bundle], count: int) -> list[tuple[_Bundle, ...]]:
    """Each bundle, longest first, into the row that is shortest so far."""
    rows: list[list[_Bundle]] = [[] for _ in range(count)]
    lengths = [(0, row) for row in range(count)]
    for bundle in order:
        length, row = heapq.heappop(lengths)
        rows[row].append(bundle)
        heapq.heappush(lengths, (length + bundle.tokens, row))
    return [tuple(row) for row in rows if row]
