"""Watching a run from its storage: what is new, and where it is, at one small read a second."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from cells.levels import LARGEST_GAP_S, Level
from flows.pace import Pace, TimeLeft
from storage.journal import JournalTail, LineTail
from storage.records import Evaluation, UpdateMetrics, decode
from storage.run import Run

_RATE_WINDOW_S = 15.0
_STALE_S = 2 * LARGEST_GAP_S
"""A manager writes more often than this, so that an older row is of one that has ended."""


@dataclass(frozen=True)
class Picture:
    """Where a run is."""

    run_id: str
    state: str
    """Of the flow run, as Prefect calls it; empty when nobody was asked."""
    running_s: float | None
    """Since the flow run began."""
    level: Level | None
    """What the manager saw last; None when no manager runs."""
    preparing: str
    """What is done before there is a manager, in words."""
    cells: tuple[str, ...]
    step: int | None
    steps: int
    updates_per_step: int
    step_updates: int
    """Updates of this step that are done."""
    updates: tuple[UpdateMetrics, ...]
    evaluations: tuple[Evaluation, ...]
    """On the run's own held-out problems, by version."""
    sampled_per_s: float | None
    """Tokens that engines sampled, over the last seconds."""
    left: TimeLeft | None


class Watch:
    """Follows the journals of a run. What is there already is not news.

    Args:
        run: opened; only its storage is asked.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._levels = JournalTail(run.store, run.layout.levels)
        self._metrics = LineTail(run.store, run.layout.metrics)
        self._preparing = LineTail(run.store, run.layout.log("warm_start"))
        self._evaluations: dict[int, Evaluation] = {}
        self._updates: list[UpdateMetrics] = []
        self._level: Level | None = None
        self._sampled: deque[tuple[float, int]] = deque()
        self._pace = Pace(run.config)
        self._said = ""
        self._state, self._started_at = "", 0.0
        self.read()

    def flow_run(self, state: str, started_at: float | None) -> None:
        """What Prefect says of the flow run: the name of its state, and when it began."""
        self._state, self._started_at = state, started_at or 0.0

    def read(self) -> tuple[list[UpdateMetrics], list[Evaluation]]:
        """Look at what was written since the last call; the updates and evaluations that are new.

        Raises:
            StorageError: storage can't be read.
            RecordError: what is there is of another version of Gyre.
        """
        for line in self._levels.read():
            self._note(decode(line, Level, where=self._run.layout.levels))
        for line in self._preparing.read():
            self._said = line.decode(errors="replace")
        where = self._run.layout.metrics
        updates = [decode(line, UpdateMetrics, where=where) for line in self._metrics.read()]
        self._updates += updates
        return updates, self._new_evaluations()

    def picture(self) -> Picture:
        """Where the run is now."""
        now = time.time()
        level = self._level if self._level and now - self._level.at < _STALE_S else None
        training = self._run.config.training
        step = self._step(level)
        own = [update for update in self._updates if update.step == step]
        return Picture(
            run_id=self._run.run_id,
            state=self._state,
            running_s=now - self._started_at if self._started_at else None,
            level=level,
            preparing=self._said,
            cells=tuple(cell.name for cell in self._run.config.cells.cells),
            step=step,
            steps=training.steps,
            updates_per_step=training.updates_per_step,
            step_updates=len(own),
            updates=tuple(self._updates),
            evaluations=tuple(self._evaluations[version] for version in sorted(self._evaluations)),
            sampled_per_s=self._rate(now) if level else None,
            left=self._pace.left(now, level, self._updates) if level else None,
        )

    def _note(self, level: Level) -> None:
        self._level = level
        self._sampled.append((level.at, level.tokens_out))
        while level.at - self._sampled[0][0] > _RATE_WINDOW_S and len(self._sampled) > 2:
            self._sampled.popleft()
        self._pace.note(level)

    def _new_evaluations(self) -> list[Evaluation]:
        store, layout = self._run.store, self._run.layout
        found = []
        for name in store.children(layout.evaluations):
            # A name with more in it than the version is of other problems than the run's own.
            version = name.removesuffix(".json")
            if version.isdigit() and int(version) not in self._evaluations:
                evaluation = store.read_record(f"{layout.evaluations}/{name}", Evaluation)
                self._evaluations[int(version)] = evaluation
                found.append(evaluation)
        return found

    def _step(self, level: Level | None) -> int | None:
        if level is not None and level.step >= 0:
            return level.step
        return self._updates[-1].step if self._updates else None

    def _rate(self, now: float) -> float | None:
        rows = [row for row in self._sampled if now - row[0] < _RATE_WINDOW_S]
        if len(rows) < 2:
            return None
        # A new gateway counts from zero again.
        tokens = sum(max(after[1] - before[1], 0) for before, after in pairwise(rows))
        return tokens / (rows[-1][0] - rows[0][0])
