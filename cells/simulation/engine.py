"""The simulation: a workload, a policy and a seed in, an outcome out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator
from typing import Any

import simpy

from cells.scheduler import (
    Adaptive,
    GroupSeen,
    Move,
    Pace,
    Policy,
    Ran,
    Role,
    Snapshot,
    Timings,
    VersionBounds,
)
from cells.simulation.cell import Cell, Session
from cells.simulation.executions import Draws
from cells.simulation.launch import groups_together, launching
from cells.simulation.outcome import Level, Outcome
from cells.simulation.pacing import PacedLaunches
from cells.simulation.rollout import Rollout, SimulationError
from cells.simulation.trainer import Group, Trainer
from cells.simulation.workload import Workload

_QUIET_S = 600.0
"""Longest time between two decisions, so that a policy may wait for time alone to pass."""


def simulate(workload: Workload, policy: Policy, seed: int = 0) -> Outcome:
    """Run `workload` under `policy`.

    Raises:
        SimulationError: if the policy leaves live work unserved or the run cannot end.
        PolicyError: if the policy cannot work with these cells.
    """
    return _Simulation(workload, policy, seed).run()


class _Simulation:
    def __init__(self, workload: Workload, policy: Policy, seed: int) -> None:
        self._workload = workload
        self._policy = policy
        self._seed = seed
        self._env = env = simpy.Environment()
        self._draws = Draws(workload, seed)
        self._cells = tuple(Cell(env, workload, n) for n in range(workload.cells.count))
        self._by_id = {cell.cell_id: cell for cell in self._cells}
        self._rollout = Rollout(env, self._cells, workload.serving, self._execution_ended)
        together = groups_together(workload.batch, policy.pipeline)
        carries = policy.pipeline.carries
        self._trainer = Trainer(env, workload, together, self._change, self._holds, carries)
        self._pacer: PacedLaunches | None = None
        if isinstance(policy, Adaptive):
            self._pacer = PacedLaunches(
                env, workload, policy, self._trainer, self._rollout, self._cells
            )
        self._left: Counter[int] = Counter()
        self._ended: dict[int, list[Session]] = defaultdict(list)
        self._serving_version = 0
        self._changed = env.event()
        self._levels: list[Level] = []
        self._switches = 0
        self._events = 0

    def run(self) -> Outcome:
        env, batch = self._env, self._workload.batch
        trainer, pipeline = self._trainer, self._policy.pipeline
        env.process(self._decide_for_ever())
        if self._pacer is None:
            ended = lambda: not trainer.unsealed  # noqa: E731
            env.process(launching(batch, pipeline, trainer, ended, self._launch))
        else:
            env.process(self._pacer.launching(self._launch, self._renew))
        limit = self._time_limit()
        while len(trainer.updates) < batch.updates:
            env.step()
            self._events += 1
            if env.now > limit:
                raise SimulationError(f"{self._policy.name} does not end: {self._snapshot()}")
        for cell in self._cells:
            cell.close()
        return Outcome(
            workload=self._workload.name,
            policy=self._policy.name,
            seed=self._seed,
            seconds=env.now,
            updates=tuple(self._trainer.updates),
            executions=tuple(self._rollout.executions),
            intervals=tuple(i for cell in self._cells for i in cell.intervals),
            levels=tuple(self._levels),
            training_busy_s=self._trainer.busy_s,
            switches=self._switches,
            events=self._events,
            choices=() if self._pacer is None else tuple(self._pacer.choices),
        )

    def _time_limit(self) -> float:
        """Seconds that even one execution and one micro-step after another would not need."""
        batch, execution = self._workload.batch, self._workload.execution
        return 100.0 * batch.queries * batch.executions_per_query * (execution.timeout_s + 600.0)

    def _launch(self, first: int, count: int) -> Generator[Any, Any, None]:
        """Launch queries under the newest version, which the serving cells pull first."""
        if self._trainer.version > self._serving_version:
            self._serving_version = self._trainer.version
            yield self._env.timeout(self._workload.training.pull_s)
        overhead = self._workload.overhead
        if overhead is not None and first:
            yield self._env.timeout(overhead.launch_s)
        self._trainer.announce(count)
        for query in range(first, first + count):
            executions = self._draws.query(query)
            self._left[query] = len(executions)
            self._rollout.launch(executions, self._serving_version)
            self._change()
            if overhead is not None:
                yield self._env.timeout(overhead.start_s * len(executions))

    @property
    def _pace(self) -> Pace:
        return Pace.BURST if self._pacer is None else self._pacer.pace

    def _renew(self) -> None:
        """Where groups are carried over, what lives goes on under the newest version."""
        if self._pace is Pace.CARRY and self._trainer.version > self._serving_version:
            self._serving_version = self._trainer.version
            self._rollout.renew(self._serving_version, self._workload.training.pull_s)

    @property
    def _oldest(self) -> int:
        """By how many updates the oldest group that still runs is behind."""
        version = self._trainer.version
        return max((version - begun for begun in self._rollout.begun.values()), default=0)

    def _holds(self) -> bool:
        """Whether an update that is complete has to wait."""
        return self._pacer is not None and self._pacer.holds(self._oldest)

    def _execution_ended(self, session: Session) -> None:
        query = session.execution.query
        self._left[query] -= 1
        self._ended[query].append(session)
        if self._left[query] == 0:
            overhead = self._workload.overhead
            if overhead is None:
                self._seal(query, self._ended.pop(query))
            else:
                self._env.process(self._seal_in(overhead.seal_s, query))
        self._change()

    def _seal_in(self, seconds: float, query: int) -> Generator[Any, Any, None]:
        yield self._env.timeout(seconds)
        self._seal(query, self._ended.pop(query))

    def _seal(self, query: int, sessions: list[Session]) -> None:
        sampled: Counter[int] = Counter()
        for session in sessions:
            sampled += session.sampled
        mean = sum(version * count for version, count in sampled.items()) / sampled.total()
        tokens = sum(session.execution.tokens for session in sessions)
        del self._rollout.begun[query], self._rollout.unsealed[query]
        if self._pacer is not None:
            self._pacer.sealed(GroupSeen.of(_ran(session) for session in sessions))
        self._trainer.seal(Group(query, mean, min(sampled), tokens))

    def _change(self) -> None:
        if not self._changed.triggered:
            self._changed.succeed()

    def _decide_for_ever(self) -> Generator[Any, Any, None]:
        while True:
            self._changed = self._env.event()
            snapshot = self._snapshot()
            self._levels.append(Level(snapshot.time, snapshot.queued, snapshot.running))
            for move in self._policy.decide(snapshot):
                self._start(move)
            yield self._changed | self._env.timeout(_QUIET_S)
            yield self._env.timeout(self._workload.cells.decide_every_s)

    def _snapshot(self) -> Snapshot:
        cells, training = self._workload.cells, self._workload.training
        return Snapshot(
            time=self._env.now,
            queued=self._rollout.queued,
            running=self._rollout.running,
            cells=tuple(cell.view() for cell in self._cells),
            training=self._trainer.work(),
            timings=Timings(
                cells.to_training_s, cells.to_rollout_s, training.pull_s, self._trainer.micro_step_s
            ),
            versions=VersionBounds(self._serving_version, self._serving_version),
            pace=self._pace,
            serving_cells=1 if self._pacer is None else self._pacer.serving_cells,
            oldest=self._oldest,
            coming=0 if self._pacer is None else self._pacer.coming,
            may_wait=0.0 if self._pacer is None else self._pacer.may_wait,
            last=self._pacer is not None and self._pacer.last,
        )

    def _start(self, move: Move) -> None:
        cell = self._by_id[move.cell_id]
        self._switches += 1
        if move.to is Role.TRAINING:
            cell.become(Role.SWITCHING, Role.TRAINING)
            self._rollout.leave(cell, may_wait=self._pace is Pace.CARRY)
            self._env.process(self._train(cell))
        else:
            cell.become(Role.SWITCHING, Role.ROLLOUT)
            self._trainer.wake(cell.cell_id)

    def _train(self, cell: Cell) -> Generator[Any, Any, None]:
        """A stay in training, from the switch there to the end of the switch back."""
        cells = self._workload.cells
        yield self._env.timeout(cells.to_training_s)
        if not cell.is_core:
            yield self._env.timeout(self._workload.training.pull_s)
        cell.become(Role.TRAINING)
        self._change()
        yield from self._trainer.replica(
            cell.cell_id, cell.is_core, lambda: cell.role is not Role.TRAINING
        )
        yield self._env.timeout(cells.to_rollout_s)
        cell.version = self._serving_version
        cell.become(Role.ROLLOUT)
        self._rollout.admit()
        self._change()


def _ran(session: Session) -> Ran:
    ended, waited = session.ended_at, session.parked_s
    return Ran(session.started_at, ended, session.execution.timed_out, waited)
