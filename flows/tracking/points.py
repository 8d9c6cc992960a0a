"""What a tracker of experiments is given of a run: named numbers over the weight version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flows.history import evaluations_of, updates_of
from storage.records import Evaluation, StepDone, UpdateMetrics
from storage.run import Run

_PLACE = {"step", "update", "policy_version", "ended_at", "logprob_gap_by_version"}
"""Where an update is, and what is no single number."""


@dataclass(frozen=True)
class Point:
    """Numbers of one moment."""

    version: int
    """Weight version after the update, or that was evaluated."""
    at: float
    """Seconds since the epoch."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Batch:
    """The points of a step, or of an evaluation, which a tracker is given together."""

    name: str
    """Of all of a run, in the order in which they came about: names sort as they did."""
    points: tuple[Point, ...]


def batches_of(run: Run) -> list[Batch]:
    """All that a run has measured in finished steps and in evaluations, in order."""
    updates = updates_of(run)
    found = []
    for step in sorted({update.step for update in updates}):
        own = tuple(update_point(update) for update in updates if update.step == step)
        key = run.layout.step_done(step)
        if run.store.exists(key):
            version = run.store.read_record(key, StepDone).policy_version
            found.append(Batch(f"{version:08d}-step-{step:05d}", own))
    for version, evaluation in evaluations_of(run).items():
        key = run.layout.evaluation(version)
        at = run.store.written_at(key) or 0.0
        found.append(Batch(f"{version:08d}-z-held-out", (evaluation_point(evaluation, at),)))
    return sorted(found, key=lambda batch: batch.name)


def update_point(update: UpdateMetrics) -> Point:
    """Every number that an update has, by its name in ``metrics.jsonl``."""
    values = {
        f"update/{name}": float(value)
        for name, value in update.model_dump(exclude=_PLACE).items()
        if isinstance(value, int | float)
    }
    return Point(update.policy_version, update.ended_at, values)


def evaluation_point(evaluation: Evaluation, at: float) -> Point:
    """The held-out result of a version."""
    values = {
        "held_out/pass_rate": evaluation.pass_rate,
        "held_out/standard_error": evaluation.standard_error,
        "held_out/problems": float(evaluation.problems),
        "held_out/excluded": float(evaluation.excluded),
        "held_out/timed_out": float(evaluation.timed_out),
    }
    return Point(evaluation.version, at, values)
