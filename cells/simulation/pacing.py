"""Launches at the pace that an adaptive policy chooses, and what it is told to choose by."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from cells.scheduler import Adaptive, GroupSeen, Measured, Pace, Pacing, Shape, Spell
from cells.simulation.launch import Launch
from cells.simulation.outcome import Choice
from cells.simulation.trainer import Trainer
from cells.simulation.workload import Workload


class Pacer:
    """Asks the policy for its pace and launches accordingly."""

    def __init__(
        self, env: simpy.Environment, workload: Workload, policy: Adaptive, trainer: Trainer
    ) -> None:
        """Nothing is launched yet; the first pace is the one for a workload that is unknown."""
        self._env = env
        self._batch = workload.batch
        self._policy = policy
        self._trainer = trainer
        self._shape = Shape(
            cells=workload.cells.count,
            capacity=workload.cells.capacity,
            groups_per_update=workload.batch.queries_per_update,
            updates_per_burst=workload.batch.updates_per_burst,
        )
        self._began = _Mark(0.0, 0, 0.0, 0)
        """Of the pace that rules now."""
        self._groups: list[GroupSeen] = []
        self._bursts: Spell | None = None
        self._settling = 0
        self.pace = Pace.BURST
        self.serving_cells = 1
        self.choices: list[Choice] = []

    def sealed(self, group: GroupSeen) -> None:
        """All executions of a group have ended."""
        self._groups.append(group)

    def launching(self, launch: Launch, paced: Callable[[], None]) -> Generator[Any, Any, None]:
        """The process that launches every query; `paced` is called with every choice."""
        launched = 0
        trainer, queries = self._trainer, self._batch.queries
        while launched < queries:
            # Less than an update's worth is left over where groups had been carried.
            left = launched - trainer.groups_trained
            done = left < self._shape.groups_per_update
            pacing = self._choose(done)
            paced()
            if pacing.pace is Pace.CARRY:
                allowed = min(trainer.groups_trained + pacing.window, queries)
            else:
                burst = trainer.groups_trained + self._shape.burst
                allowed = min(burst, queries) if done else launched
            if allowed > launched:
                first, launched = launched, allowed
                yield from launch(first, allowed - first)
            else:
                yield trainer.published
        while True:
            yield trainer.published
            paced()

    def _choose(self, done: bool) -> Pacing:
        """The pace from now on; a burst under way goes on to its end."""
        if self.pace is Pace.BURST and not done:
            return Pacing(Pace.BURST, self._shape.burst, 1, "")
        spell = self._spell()
        left = self._batch.queries - self._trainer.groups_trained
        carried: Spell | None = None
        if self.pace is Pace.BURST:
            self._bursts = spell or self._bursts
        elif self._settling < 0:
            carried = spell
        pacing = self._policy.pacing(Measured(self._bursts, carried), self._shape, left)
        self._settling -= 1
        if pacing.pace is not self.pace:
            self._began = self._mark()
            # Until all that is trained was launched at this pace it shows nothing of it.
            self._settling = self._shape.updates_per_burst if pacing.pace is Pace.CARRY else 0
        elif self._settling == 0:
            self._began = self._mark()
        if pacing.pace is not self.pace or pacing.pace is Pace.BURST:
            self.choices.append(Choice(self._env.now, pacing.pace, pacing.reason))
        self.pace, self.serving_cells = pacing.pace, pacing.serving_cells
        return pacing

    def _mark(self) -> _Mark:
        trainer = self._trainer
        return _Mark(self._env.now, len(trainer.updates), trainer.busy_s, len(self._groups))

    def _spell(self) -> Spell | None:
        """What was measured since the pace began."""
        then, now = self._began, self._mark()
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
            staleness=sum(update.staleness for update in updates) / len(updates),
        )


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far the run was at a moment."""

    time: float
    updates: int
    busy_s: float
    groups: int
