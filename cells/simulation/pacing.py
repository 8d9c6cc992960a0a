"""Launches at the pace that an adaptive policy chooses, and what it is told to choose by."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy

from cells.scheduler import Adaptive, GroupSeen, Pace, Pacer, Ran, Shape, SoFar
from cells.simulation.cell import Cell, Session
from cells.simulation.launch import Launch
from cells.simulation.outcome import Choice
from cells.simulation.rollout import Rollout
from cells.simulation.trainer import Trainer
from cells.simulation.workload import Workload


class PacedLaunches:
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
        shape = Shape(
            cells=workload.cells.count,
            capacity=workload.cells.capacity,
            groups_per_update=workload.batch.queries_per_update,
            updates_per_burst=workload.batch.updates_per_burst,
        )
        self._pacer = Pacer(policy, shape, workload.batch.queries)
        self._groups: list[GroupSeen] = []
        self._launched = 0
        self.choices: list[Choice] = []

    @property
    def pace(self) -> Pace:
        """The pace that rules now."""
        return self._pacer.pacing.pace

    @property
    def serving_cells(self) -> int:
        """See `Snapshot`."""
        return self._pacer.pacing.serving_cells

    @property
    def may_wait(self) -> float:
        """See `Snapshot`."""
        return self._pacer.pacing.may_wait

    def sealed(self, group: GroupSeen) -> None:
        """All executions of a group have ended."""
        self._groups.append(group)

    def holds(self, oldest: int) -> bool:
        """Whether an update that is complete waits for a group that would become too old."""
        return self.pace is Pace.CARRY and self._policy.holds(oldest)

    @property
    def coming(self) -> int:
        """Executions that will be launched with the update under way, once it is all claimed."""
        if not self._trainer.closing:
            return 0
        return self._pacer.coming(self._so_far()) * self._batch.executions_per_query

    @property
    def last(self) -> bool:
        """Whether everything is launched."""
        return self._launched == self._batch.queries

    def launching(self, launch: Launch, paced: Callable[[], None]) -> Generator[Any, Any, None]:
        """The process that launches every query; `paced` is called with every choice."""
        while not self.last:
            version = self._trainer.version
            self._choose()
            paced()
            allowed = self._pacer.allowed(self._so_far())
            if allowed > self._launched:
                first, self._launched = self._launched, allowed
                yield from launch(first, allowed - first)
            if self._trainer.version == version:  # none was published while these were launched
                yield self._trainer.published
        while True:
            yield self._trainer.published
            paced()

    def _choose(self) -> None:
        before = self.pace
        choice = self._pacer.choose(self._so_far())
        if choice is not None and Pace.BURST in (choice.pacing.pace, before):
            pacing = choice.pacing
            self.choices.append(Choice(self._env.now, pacing.pace, pacing.reason))

    def _so_far(self) -> SoFar:
        trainer, now = self._trainer, self._env.now
        running: list[list[Ran]] = []
        serving_s = 0.0
        if self.pace is Pace.BURST:
            running = [
                [self._ran(session, now) for session in sessions]
                for sessions in self._rollout.unsealed.values()
            ]
            serving_s = sum(cell.rollout_s() for cell in self._cells)
        return SoFar(
            time=now,
            staleness=[update.staleness for update in trainer.updates],
            busy_s=trainer.busy_s,
            groups=self._groups,
            launched=self._launched,
            running=running,
            serving_s=serving_s,
        )

    def _ran(self, session: Session, now: float) -> Ran:
        began = session.started_at
        if session.ended_at > began:
            return Ran(began, session.ended_at, session.execution.timed_out)
        return Ran.expected(began, now, self._limit_s)
