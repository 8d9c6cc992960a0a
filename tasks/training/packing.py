"""Samples into micro-steps of at most a number of tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleSize:
    """A sample and what it costs."""

    group: str
    """Query of its sealed group."""
    index: int
    tokens: int
    targets: int


def pack(samples: Sequence[SampleSize], budget: int) -> list[tuple[SampleSize, ...]]:
    """The fewest rows that a greedy balance finds, of about equal length.

    The result depends on the set of samples only. Rows are concatenated, never padded, so equal
    lengths matter for replicas that work side by side, not for waste. A sample longer than
    ``budget`` has a row of its own.
    """
    order = sorted(samples, key=lambda sample: (-sample.tokens, sample.group, sample.index))
    long = [sample for sample in order if sample.tokens >= budget]
    short = order[len(long) :]
    rows: list[tuple[SampleSize, ...]] = [(sample,) for sample in long]
    count = math.ceil(sum(sample.tokens for sample in short) / budget)
    while short:
        balanced = _balance(short, count)
        if all(sum(sample.tokens for sample in row) <= budget for row in balanced):
            return rows + balanced
        count += 1
    return rows


def _balance(order: Sequence[SampleSize], count: int) -> list[tuple[SampleSize, ...]]:
    """Each sample, longest first, into the row that is shortest so far."""
    rows: list[list[SampleSize]] = [[] for _ in range(count)]
    lengths = [(0, row) for row in range(count)]
    for sample in order:
        length, row = heapq.heappop(lengths)
        rows[row].append(sample)
        heapq.heappush(lengths, (length + sample.tokens, row))
    return [tuple(row) for row in rows if row]
