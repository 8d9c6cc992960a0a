"""Giving a run's trackers what they do not have yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from flows.tracking.points import Batch, batches_of
from flows.tracking.remote import MlFlow, WeightsAndBiases
from flows.tracking.tensorboard import TensorBoard
from storage.run import Run


class Tracker(Protocol):
    """Gets batches in order; one that failed is given again with the next."""

    def sent(self) -> set[str]:
        """Names of the batches that it has."""

    def send(self, batch: Batch) -> None:
        """Take a batch. Given twice, it must do no harm."""


def trackers_of(run: Run) -> list[Tracker]:
    """Those that the settings of a run name."""
    asked = run.config.tracking
    found: list[Tracker] = [TensorBoard(run)] if asked.tensorboard else []
    if asked.wandb:
        found.append(WeightsAndBiases(run))
    if asked.mlflow:
        found.append(MlFlow(run))
    return found


def track(run: Run, warn: Callable[..., Any]) -> None:
    """Send what each tracker lacks. One that fails is no reason for a run to fail: it is said, and
    tried again after the next step."""
    try:
        batches = batches_of(run)
    except Exception as error:  # noqa: BLE001
        warn("trackers were given nothing: %s", error)
        return
    for tracker in trackers_of(run):
        try:
            there = tracker.sent()
            for batch in batches:
                if batch.name not in there:
                    tracker.send(batch)
        except Exception as error:  # noqa: BLE001
            warn("%s was not given all figures: %s", type(tracker).__name__, error)
