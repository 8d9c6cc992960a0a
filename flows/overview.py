"""What a run amounts to, for lists of runs and for programs: state, progress, held-out results."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cells.client import DaemonClient, DaemonError
from flows.comparison import Comparison, compare, comparison_value
from flows.history import updates_of
from storage.records import Record, RecordError, UpdateMetrics
from storage.run import Run


class RunState(StrEnum):
    """Where a run is, as far as its storage and its daemons can tell."""

    NEW = "new"
    """Nothing was recorded yet, and nothing runs."""
    RUNNING = "running"
    """Its daemons live."""
    DONE = "done"
    """All steps that it was to run are done."""
    UNFINISHED = "unfinished"
    """It has stopped before its end, and can be resumed."""


@dataclass(frozen=True)
class Overview:
    """A run at one moment."""

    run: Run
    state: RunState
    steps_done: int
    updates: tuple[UpdateMetrics, ...]
    comparison: Comparison
    began_at: float | None
    """When its settings were recorded, in seconds since the epoch."""
    changed_at: float | None
    """When it was last heard of: its last update, or its settings."""


def look_at(run: Run) -> Overview:
    """The overview of a run.

    Raises:
        StorageError: storage can't be read.
        RecordError: something in it is of another version of Gyre.
    """
    updates = tuple(updates_of(run))
    steps_done = _steps_done(run)
    comparison = compare(run)
    began_at = run.store.written_at(run.layout.identity)
    if daemons_live(run):
        state = RunState.RUNNING
    elif steps_done >= run.config.training.steps:
        state = RunState.DONE
    elif updates or steps_done or run.store.children(run.layout.evaluations):
        state = RunState.UNFINISHED
    else:
        state = RunState.UNFINISHED if run.store.children(run.layout.owners) else RunState.NEW
    return Overview(
        run=run,
        state=state,
        steps_done=steps_done,
        updates=updates,
        comparison=comparison,
        began_at=began_at,
        changed_at=updates[-1].ended_at if updates else began_at,
    )


def daemons_live(run: Run) -> bool:
    """Whether any daemon that is registered for the run answers."""
    names = run.store.children(run.layout.hosts)
    for name in names:
        with suppress(DaemonError, RecordError):
            client = DaemonClient.find(run.store, run.layout, name.removesuffix(".json"))
            try:
                if client.alive():
                    return True
            finally:
                client.close()
    return False


RUN_COLUMNS = (
    *("run", "state", "settings", "seed", "step", "held out before", "after", "gain"),
    *("began", "last update"),
)
"""Of a table of runs."""


def run_row(overview: Overview) -> tuple[str, ...]:
    """What a table of runs shows of one, by ``RUN_COLUMNS``. Times are those of this machine."""
    config = overview.run.config
    versions, gain = overview.comparison.versions, overview.comparison.gain
    return (
        overview.run.run_id,
        overview.state.value,
        config.name,
        str(config.seed),
        f"{overview.steps_done}/{config.training.steps}",
        f"{versions[0].pass_rate.mean:.3f}" if versions else "-",
        f"{versions[-1].pass_rate.mean:.3f}" if len(versions) > 1 else "-",
        "-" if gain is None else f"{gain.pass_rate.mean:+.3f}",
        _when(overview.began_at),
        _when(overview.updates[-1].ended_at if overview.updates else None),
    )


def _when(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def overview_value(overview: Overview) -> dict[str, Any]:
    """As an object for programs. Times are seconds since the epoch."""
    run = overview.run
    return {
        "run": run.run_id,
        "root": run.store.url,
        "state": overview.state.value,
        "config": run.config.name,
        "seed": run.config.seed,
        "steps_done": overview.steps_done,
        "steps": run.config.training.steps,
        "began_at": overview.began_at,
        "changed_at": overview.changed_at,
        "held_out": comparison_value(overview.comparison),
        "updates": [_plain(update) for update in overview.updates],
    }


def _plain(record: Record) -> dict[str, Any]:
    return record.model_dump(mode="json")


def _steps_done(run: Run) -> int:
    done = 0
    while run.store.exists(run.layout.step_done(done)):
        done += 1
    return done
