"""When queries are launched, which decides how stale what they produce will be trained."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from cells.scheduler import Pipeline
from cells.simulation.trainer import Trainer
from cells.simulation.workload import AsyncLaunch, BatchModel

Launch = Callable[[int, int], Generator[Any, Any, None]]
"""Launches `count` queries from number `first` on, as a part of a simpy process."""


def launching(
    batch: BatchModel,
    pipeline: Pipeline,
    trainer: Trainer,
    rollouts_ended: Callable[[], bool],
    launch: Launch,
) -> Generator[Any, Any, None]:
    """The process that launches every query of a run, as the policy's pipeline asks for."""
    if pipeline.lag and batch.async_launch is AsyncLaunch.WINDOW:
        return _within_window(batch, trainer, launch)
    lag = 0 if batch.async_launch is AsyncLaunch.BURSTS else pipeline.lag
    return _in_steps(batch, lag, trainer, rollouts_ended, launch)


def groups_together(batch: BatchModel, pipeline: Pipeline) -> int:
    """How many groups must be sealed before the first of them may be trained."""
    if pipeline.streaming:
        return 1
    if pipeline.lag and batch.async_launch is AsyncLaunch.WINDOW:
        return batch.queries_per_update
    return batch.queries_per_update * batch.updates_per_burst


def _within_window(
    batch: BatchModel, trainer: Trainer, launch: Launch
) -> Generator[Any, Any, None]:
    """A query whenever fewer than 1 + s updates' worth of them are launched and not trained.

    A group that has s updates' worth of others before it is trained s updates after its launch, so
    that the mean staleness is s; here s is that of the bursts, which makes the two comparable.
    """
    window = round((1 + batch.mean_staleness) * batch.queries_per_update)
    launched = 0
    while launched < batch.queries:
        allowed = min(trainer.groups_trained + window, batch.queries)
        if allowed > launched:
            yield from launch(launched, allowed - launched)
            launched = allowed
        else:
            yield trainer.published


def _in_steps(
    batch: BatchModel,
    lag: int,
    trainer: Trainer,
    rollouts_ended: Callable[[], bool],
    launch: Launch,
) -> Generator[Any, Any, None]:
    """A step's queries when the last step's have ended and all but `lag` steps are trained.

    Without a lag the mean staleness is (n - 1)/2 of n updates in a step; with a lag of one that
    does not stream, n more than that.
    """
    size = batch.updates_per_burst * batch.queries_per_update
    for first in range(0, batch.queries, size):
        while trainer.groups_trained < first - lag * size:
            yield trainer.published
        while not rollouts_ended():
            yield trainer.sealing
        yield from launch(first, size)
