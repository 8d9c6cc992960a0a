"""What a run has measured so far, as storage has it."""

from __future__ import annotations

from flows.held_out import HeldOut, find_evaluations
from storage.journal import read_lines
from storage.records import Evaluation, UpdateMetrics, decode
from storage.run import Run


def updates_of(run: Run) -> list[UpdateMetrics]:
    """The updates of a run so far, in order."""
    lines = read_lines(run.store, run.layout.metrics)
    return [decode(line, UpdateMetrics, where=run.layout.metrics) for line in lines]


def evaluations_of(run: Run) -> dict[int, Evaluation]:
    """The evaluations on the run's own held-out problems so far, by version."""
    return find_evaluations(run, HeldOut.of(run, None, None, None))
