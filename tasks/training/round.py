"""The micro-steps of one update, on whichever replicas are there, until all are at the core."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from cells.scheduler import TrainingWork
from configs.run import RunConfig
from tasks.training.arrivals import Arrivals
from tasks.training.crew import Crew, Done, Job, JobKind
from tasks.training.events import MicroStep
from tasks.training.exchange import CoreLostError, fetch, join
from tasks.training.feed import GroupFeed
from tasks.training.ledger import Ledger, MicroState
from tasks.training.packing import pack
from tasks.training.replica import MicroAnswer, Replica, ReplicaLostError
from tasks.training.work import training_work

_LOOK_EVERY_S = 0.2
"""How soon a replica that joined or left is noticed."""
_LONGEST_PAUSE_S = 30.0


class NoReplicaError(RuntimeError):
    """Samples are ready and nobody has trained them for too long."""


class Round:
    """Trains one update after the other; keeps what it knows of the replicas in between.

    Args:
        members: the replicas that may train now. One that is missing finishes its micro-step, its
            gradient is brought to the core, and then it is left alone.
        report: called with the work that is left whenever that may have changed.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        ledger: Ledger,
        arrivals: Arrivals,
        feed: GroupFeed,
        crew: Crew,
        members: Callable[[], Mapping[str, Replica]],
        report: Callable[[TrainingWork], None],
    ) -> None:
        self._budget = config.training.micro_step_tokens
        self._patience_s = config.cells.start_limit_s + config.cells.switch_limit_s
        self._updates = config.training.updates_per_step
        self._ledger = ledger
        self._arrivals = arrivals
        self._feed = feed
        self._crew = crew
        self._look = members
        self._report = report
        self._seen: dict[str, Replica] = {}
        self._weights: dict[str, int] = {}
        """Version that a satellite is known to hold, with an empty gradient besides its own."""
        self._losses: Counter[str] = Counter()
        self._retry_at: dict[str, float] = {}
        self._descriptor: dict[str, Any] | None = None
        self._update = 0
        self._version = 0
        self._progress = time.monotonic()
        self._started: float | None = None

    def wait_for_core(self) -> Replica:
        """The core, once it may train; groups are taken in meanwhile."""
        self._progress = time.monotonic()
        while True:
            self._arrivals.pump()
            core = self._core(self._look())
            if core is not None:
                return core
            self.report(closing=not self._arrivals.missing())
            self._rest()

    def train(self, update: int, version: int) -> tuple[Replica, float]:
        """Bring all micro-steps of an update to the core, whose weights have this version.

        Returns:
            The core, and the seconds since the first claim (0 without any).

        Raises:
            CoreLostError: the core failed; what the update had accumulated is lost.
            NoReplicaError: there was nobody to train.
        """
        self._update, self._version, self._descriptor = update, version, None
        self._started = None
        self._progress = time.monotonic()
        while True:
            if self._arrivals.pump():
                self._progress = time.monotonic()
            for done in self._crew.finished():
                self._progress = time.monotonic()
                self._settle(done)
            members = self._look()
            self._seen.update(members)
            core = self._core(members)
            if core is not None and self._all_accumulated() and self._crew.idle():
                satellites = [name for name in self._held_by() if name != core.name]
                if not satellites:
                    self._ledger.reduce(core.name)
                    self.report(closing=True)
                    started = self._started
                    return core, 0.0 if started is None else time.monotonic() - started
                self._start_reduce(core, satellites[0])
            elif core is not None:
                self._bring_home(core, members)
                self._assign(core, members)
            self.report(closing=self._all_accumulated())
            self._rest()

    def report(self, *, closing: bool) -> None:
        self._report(
            training_work(
                self._ledger,
                self._arrivals,
                update=self._update,
                updates=self._updates,
                budget=self._budget,
                closing=closing,
            )
        )

    def _settle(self, done: Done) -> None:
        job, core = done.job, self._seen[done.job.replica].core
        if done.lost is not None:
            if core:
                raise CoreLostError(f"{job.kind}: {done.lost}") from done.lost
            self._lose(job, done.lost)
        elif job.kind is JobKind.MICRO_STEP:
            assert job.micro_step is not None and isinstance(done.result, MicroAnswer)
            self._ledger.accumulate(job.micro_step.id, job.replica, done.result.stats)
        elif job.kind is JobKind.PUBLISH:
            assert isinstance(done.result, dict)
            self._descriptor = done.result
        elif job.kind is JobKind.JOIN:
            self._weights[job.replica] = self._version
            self._losses[job.replica] = 0
        elif job.kind is JobKind.REDUCE:
            self._ledger.reduce(job.replica)
            if not done.result:
                self._weights.pop(job.replica, None)

    def _lose(self, job: Job, lost: ReplicaLostError) -> None:
        """A satellite is gone: its work is ready again, and it may join anew after a pause."""
        self._ledger.give_back(job.replica, str(lost))
        self._weights.pop(job.replica, None)
        self._losses[job.replica] += 1
        pause = min(_LONGEST_PAUSE_S, 0.5 * (2 ** (self._losses[job.replica] - 1) - 1))
        self._retry_at[job.replica] = time.monotonic() + pause

    def _assign(self, core: Replica, members: Mapping[str, Replica]) -> None:
        now = time.monotonic()
        joining = [
            replica
            for replica in members.values()
            if not replica.core
            and not self._crew.busy(replica.name)
            and self._weights.get(replica.name) != self._version
            and self._retry_at.get(replica.name, 0.0) <= now
        ]
        joining = joining if self._work_left() else []
        if not self._crew.busy(core.name) and joining and self._descriptor is None:
            self._crew.start(Job(JobKind.PUBLISH, core.name), core.publish)
        for replica in joining:
            if self._descriptor is not None:
                self._start_join(replica, self._descriptor)
        for replica in sorted(members.values(), key=lambda r: (not r.core, r.name)):
            holds = replica.core or self._weights.get(replica.name) == self._version
            if holds and not self._crew.busy(replica.name):
                micro_step = self._claim(replica.name)
                if micro_step is not None:
                    self._start_micro_step(replica, micro_step)

    def _claim(self, replica: str) -> MicroStep | None:
        """The next micro-step. Samples are packed only when somebody wants them, so that groups
        that came meanwhile are packed together."""
        if not self._ledger.count(self._update, MicroState.READY):
            waiting = self._arrivals.unformed(self._update)
            self._ledger.form(self._update, pack(waiting, self._budget))
        return self._ledger.claim(self._update, replica)

    def _start_micro_step(self, replica: Replica, micro_step: MicroStep) -> None:
        if self._started is None:
            self._started = time.monotonic()
        job = Job(JobKind.MICRO_STEP, replica.name, micro_step)
        self._crew.start(job, lambda: replica.micro_step(micro_step))

    def _start_join(self, replica: Replica, descriptor: dict[str, Any]) -> None:
        version = self._version
        self._crew.start(
            Job(JobKind.JOIN, replica.name), lambda: join(replica, descriptor, version)
        )

    def _bring_home(self, core: Replica, members: Mapping[str, Replica]) -> None:
        """Fetch the gradient of a replica that may no longer train."""
        for name in self._held_by():
            if name not in members and not self._crew.busy(name):
                if not self._crew.busy(core.name):
                    self._start_reduce(core, name)
                return

    def _start_reduce(self, core: Replica, name: str) -> None:
        satellite, update = self._seen[name], self._update
        expected = set(self._ledger.held(update, name))
        self._crew.start(
            Job(JobKind.REDUCE, name),
            lambda: fetch(core, satellite, update, expected),
            also=(core.name,),
        )

    def _core(self, members: Mapping[str, Replica]) -> Replica | None:
        return next((replica for replica in members.values() if replica.core), None)

    def _held_by(self) -> list[str]:
        return self._ledger.holders(self._update)

    def _work_left(self) -> bool:
        """Whether somebody who joins now will find something to do."""
        return (
            self._ledger.count(self._update, MicroState.READY) > 0
            or not self._arrivals.complete(self._update)
            or bool(self._arrivals.unformed(self._update))
        )

    def _all_accumulated(self) -> bool:
        open_states = (MicroState.READY, MicroState.CLAIMED)
        return not self._work_left() and not self._ledger.count(self._update, *open_states)

    def _rest(self) -> None:
        """Until something happens.

        Raises:
            NoReplicaError: nothing has for too long, although every group has come.
        """
        if not self._crew.idle() or self._arrivals.missing():
            self._progress = time.monotonic()  # commands and the feed have deadlines of their own
        elif time.monotonic() - self._progress > self._patience_s:
            raise NoReplicaError(
                f"update {self._update} waits for a core to train: none for "
                f"{self._patience_s:g} s; replicas there now: {', '.join(self._look()) or 'none'}"
            )
        self._feed.wait(_LOOK_EVERY_S)
