"""Launches at the pace that an adaptive policy chooses, and what it is told to choose by."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import simpy

from cells.scheduler import Adaptive, GroupSeen, Measured, Pace, Pacing, Ran, Shape, Spell
from cells.simulation.cell import Cell, Session
from cells.simulation.launch import Launch
from cells.simulation.outcome import Choice
from cells.simulation.rollout import Rollout
from cells.simulation.trainer import Trainer
from cells.simulation.workload import Workload


class Pacer:
    """Asks the policy for its pace and launches accordingly."""

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        policy: Adaptive,
        trainer: Trainer,
        rollout: Rollout,
        cells: tuple[Cell, ...],
    ) -> None:
        """Nothing is launched yet; the first pace is the one for a workload that is unknown."""
        self._env = env
        self._batch = workload.batch
        self._limit_s = workload.execution.timeout_s
        self._policy = policy
        self._trainer = trainer
        self._rollout = rollout
        self._cells = cells
        self._shape = Shape(
            cells=workload.cells.count,
            capacity=workload.cells.capacity,
            groups_per_update=workload.batch.queries_per_update,
            updates_per_burst=workload.batch.updates_per_burst,
        )
        self._marks = [_Mark(0.0, 0, 0.0, 0, 0)]
        """Of the choices since the pace that rules now began."""
        self._groups: list[GroupSeen] = []
        self._bursts: Spell | None = None
        self._launched = 0
        self.pace = Pace.BURST
        self.serving_cells = 1
        self.may_wait = 0.0
        self._window = 0
        self.choices: list[Choice] = []

    def sealed(self, group: GroupSeen) -> None:
        """All executions of a group have ended."""
        self._groups.append(group)

    def holds(self, oldest: int) -> bool:
        """Whether an update that is complete waits for a group that would become too old."""
        return self.pace is Pace.CARRY and self._policy.holds(oldest)

    @property
    def coming(self) -> int:
        """Executions that will be launched with the update under way, once it is all claimed."""
        if self.pace is not Pace.CARRY or not self._trainer.closing:
            return 0
        trained = self._trainer.groups_trained + self._shape.groups_per_update
        allowed = min(trained + self._window, self._batch.queries)
        return max(0, allowed - self._launched) * self._batch.executions_per_query

    @property
    def last(self) -> bool:
        """Whether everything is launched."""
        return self._launched == self._batch.queries

    def launching(self, launch: Launch, paced: Callable[[], None]) -> Generator[Any, Any, None]:
        """The process that launches every query; `paced` is called with every choice."""
        trainer, queries = self._trainer, self._batch.queries
        while not self.last:
            # Less than an update's worth is left over where groups had been carried.
            done = self._launched - trainer.groups_trained < self._shape.groups_per_update
            pacing = self._choose(done)
            paced()
            if pacing.pace is Pace.CARRY:
                allowed = min(trainer.groups_trained + pacing.window, queries)
            else:
                burst = trainer.groups_trained + self._shape.burst
                allowed = min(burst, queries) if done else self._launched
            if allowed > self._launched:
                first, self._launched = self._launched, allowed
                yield from launch(first, allowed - first)
            yield trainer.published
        while True:
            yield trainer.published
            paced()

    def _choose(self, done: bool) -> Pacing:
        """The pace from now on; a burst under way is left only to carry its groups over."""
        burst = Pacing(Pace.BURST, self._shape.burst, 1, "")
        bursts, carried = self._bursts, None
        if self.pace is Pace.BURST:
            if not done and bursts is not None:
                return burst
            bursts = self._since(self._marks[0]) if done else self._first_burst()
        else:
            carried = self._carried()
        left = self._batch.queries - self._trainer.groups_trained
        mean = self._shape.staleness
        excess = sum(update.staleness - mean for update in self._trainer.updates)
        pacing = self._policy.pacing(Measured(bursts, carried, excess), self._shape, left)
        if not done and pacing.pace is self.pace is Pace.BURST:
            return burst
        self._bursts = bursts
        if pacing.pace is not self.pace:
            self._marks.clear()
        self._marks.append(self._mark(pacing.window))
        if pacing.pace is not self.pace or pacing.pace is Pace.BURST:
            self.choices.append(Choice(self._env.now, pacing.pace, pacing.reason))
        self.pace, self.serving_cells = pacing.pace, pacing.serving_cells
        self.may_wait = pacing.may_wait
        self._window = pacing.window
        return pacing

    def _mark(self, window: int) -> _Mark:
        trainer = self._trainer
        updates, groups = len(trainer.updates), len(self._groups)
        return _Mark(self._env.now, updates, trainer.busy_s, groups, window)

    def _carried(self) -> Spell | None:
        """The last updates of which all was launched at this pace."""
        burst = self._shape.updates_per_burst
        marks = self._marks[burst:][-2 * burst :]
        if not marks:
            return None
        # What was trained since was launched under the windows before.
        windows = [mark.window for mark in self._marks[: -burst // 2][-len(marks) :]]
        return self._since(marks[0], fmean(windows))

    def _since(self, then: _Mark, window: float = 0.0) -> Spell | None:
        """What was measured since then."""
        now = self._mark(0)
        updates = self._trainer.updates[then.updates :]
        groups = self._groups[then.groups :]
        if not updates or not groups:
            return None
        trained = len(updates) * self._shape.groups_per_update
        return Spell(
            updates=len(updates),
            update_s=(now.time - then.time) / len(updates),
            train_s=(now.busy_s - then.busy_s) / trained,
            groups=groups,
            staleness=fmean(update.staleness for update in updates),
            window=window,
        )

    def _first_burst(self) -> Spell | None:
        """The first burst while it is trained: what still runs is taken to run as long again."""
        trainer, now = self._trainer, self._env.now
        running = [
            [self._ran(session, now) for session in sessions]
            for sessions in self._rollout.unsealed.values()
        ]
        if not trainer.updates or not self._groups:
            return None
        trained = len(trainer.updates) * self._shape.groups_per_update
        train_s = trainer.busy_s / trained
        ends = [ran.ended - now for group in running for ran in group]
        serving_s = sum(cell.rollout_s() for cell in self._cells) + max(ends, default=0.0)
        return Spell(
            updates=len(trainer.updates),
            update_s=self._shape.burst_update_s(serving_s, train_s),
            train_s=train_s,
            groups=[*self._groups, *(GroupSeen.of(group) for group in running)],
            running=len(running),
        )

    def _ran(self, session: Session, now: float) -> Ran:
        began = session.started_at
        if session.ended_at > began:
            return Ran(began, session.ended_at, session.execution.timed_out)
        ended = began + min(2 * (now - began), self._limit_s)
        return Ran(began, ended, ended - began == self._limit_s)


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far the run was at a moment."""

    time: float
    updates: int
    busy_s: float
    groups: int
    window: int
