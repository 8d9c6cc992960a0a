"""The micro-steps of one update, on whichever replicas are there, until all are at the core."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from cells.scheduler import TrainingWork
from configs.run import RunConfig
from tasks.training.arrivals import Arrivals
from tasks.training.crew import Crew, Done, Job, JobKind
from tasks.training.events import MicroStep
from tasks.training.exchange import CoreLostError, fetch, holds, join
from tasks.training.feed import GroupFeed
from tasks.training.ledger import Ledger, MicroState
from tasks.training.metrics import BUSY
from tasks.training.packing import pack
from tasks.training.replica import MicroAnswer, Replica, ReplicaLostError
from tasks.training.satellites import Satellites
from tasks.training.work import training_work

_LOOK_EVERY_S = 0.2
"""How soon a replica that joined or left is noticed."""
_RESTARTS = 8
"""How often a core may come back without its gradient in one update."""


class NoReplicaError(RuntimeError):
    """Samples are ready and nobody has trained them for too long."""


class Round:
    """Trains one update after the other; keeps what it knows of the replicas in between.

    Args:
        members: the replicas that may train now. One that is missing finishes its micro-step, its
            gradient is brought to the core, and then it is left alone.
        report: called with the work that is left whenever that may have changed.
        held: called as often with the replicas that are busy, or whose gradient is not at the core.
        waits: called as often with what training waits for, in words.
        holds: asked when an update is complete: whether it has to wait all the same.
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
        held: Callable[[frozenset[str]], None],
        waits: Callable[[str], None],
        holds: Callable[[], bool],
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
        self._held = held
        self._waits = waits
        self._holds = holds
        self._holding = False
        self._seen: dict[str, Replica] = {}
        self._satellites = Satellites()
        self._descriptor: dict[str, Any] | None = None
        self._update = 0
        self._version = 0
        self._progress = time.monotonic()
        self._started: float | None = None
        self._restarts = 0

    def wait_for_core(self) -> Replica:
        """The core, once it may train; groups are taken in meanwhile."""
        self._progress = time.monotonic()
        while True:
            self._arrivals.pump()
            core = self._core(self._look())
            if core is not None:
                return core
            self._tell(core, closing=not self._arrivals.missing())
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
        self._restarts = 0
        self._holding = in_doubt = False
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
            in_doubt = in_doubt or core is None
            if core is not None and in_doubt:
                # It was away. Its work may have to be done again, and no replica's meanwhile.
                if self._crew.idle():
                    self._verify(core)
                    self._descriptor, in_doubt = None, False
            elif core is not None and self._all_brought() and not self._must_hold():
                satellites = [name for name in self._held_by() if name != core.name]
                if satellites:
                    self._start_reduce(core, satellites[0])
                elif self._verify(core):
                    self._ledger.reduce(core.name)
                    self._tell(core, closing=True)
                    started = self._started
                    return core, 0.0 if started is None else time.monotonic() - started
            elif core is not None:
                self._bring_home(core, members)
                self._assign(core, members)
            self._tell(core, closing=self._all_accumulated())
            self._rest()

    def _tell(self, core: Replica | None, *, closing: bool) -> None:
        """The scheduler: which replicas are needed, and what is left."""
        holders = self._held_by()
        self._held(
            frozenset(
                name
                for name, replica in self._seen.items()
                if self._crew.busy(name) or (name in holders and not replica.core)
            )
        )
        self._report(
            training_work(
                self._ledger,
                self._arrivals,
                update=self._update,
                updates=self._updates,
                budget=self._budget,
                closing=closing,
                awaited=core is None,
            )
        )

    def _settle(self, done: Done) -> None:
        job, core = done.job, self._seen[done.job.replica].core
        if done.lost is not None:
            if core:
                raise CoreLostError(f"{job.kind}: {done.lost}") from done.lost
            self._ledger.give_back(job.replica, str(done.lost))
            self._satellites.failed(job.replica)
            if job.kind is JobKind.JOIN:
                self._descriptor = None  # whoever comes next gets a new one
        elif job.kind is JobKind.MICRO_STEP:
            assert job.micro_step is not None and isinstance(done.result, MicroAnswer)
            stats = {**done.result.stats, BUSY: done.result.seconds}
            self._ledger.accumulate(job.micro_step.id, job.replica, stats)
            self._satellites.worked(job.replica)
        elif job.kind is JobKind.PUBLISH:
            assert isinstance(done.result, dict)
            self._descriptor = done.result
        elif job.kind is JobKind.JOIN:
            self._satellites.joined(job.replica, self._version)
        elif job.kind is JobKind.REDUCE:
            self._ledger.reduce(job.replica)
            if not done.result:
                self._satellites.doubt(job.replica)

    def _verify(self, core: Replica) -> bool:
        """Whether the core still holds what it accumulated; if it was put to sleep meanwhile, or
        died and came back with the same weights, all of the update is ready again. Only while
        no replica works."""
        expected = self._ledger.at_core(self._update, core.name)
        if not expected or holds(core, self._version, expected):
            return True
        self._restarts += 1
        if self._restarts > _RESTARTS:
            raise CoreLostError(f"{core.name}: lost its gradient {self._restarts} times")
        self._ledger.restart(self._update, f"the gradient of {core.name} is gone")
        self._satellites.doubt_all()  # so that satellites empty theirs before they go on
        try:
            core.discard()
        except ReplicaLostError as error:
            raise CoreLostError(str(error)) from error
        return False

    def _assign(self, core: Replica, members: Mapping[str, Replica]) -> None:
        joining = [
            replica
            for replica in members.values()
            if not replica.core
            and not self._crew.busy(replica.name)
            and not self._satellites.hold(replica.name, self._version)
            and self._satellites.may_join(replica.name)
        ]
        joining = joining if self._work_left() else []
        if not self._crew.busy(core.name) and joining and self._descriptor is None:
            self._crew.start(Job(JobKind.PUBLISH, core.name), core.publish)
        for replica in joining:
            if self._descriptor is not None:
                self._start_join(replica, self._descriptor)
        for replica in sorted(members.values(), key=lambda r: (not r.core, r.name)):
            able = replica.core or self._satellites.hold(replica.name, self._version)
            if able and not self._crew.busy(replica.name):
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

    def _all_brought(self) -> bool:
        return self._all_accumulated() and self._crew.idle()

    def _must_hold(self) -> bool:
        self._holding = self._holds()
        return self._holding

    def _rest(self) -> None:
        """Until something happens.

        Raises:
            NoReplicaError: nothing has for too long, although every group has come.
        """
        if not self._crew.idle() or self._arrivals.missing() or self._holding:
            self._progress = time.monotonic()  # commands and the feed have deadlines of their own
        elif time.monotonic() - self._progress > self._patience_s:
            raise NoReplicaError(
                f"update {self._update} waits for a core to train: none for "
                f"{self._patience_s:g} s; replicas there now: {', '.join(self._look()) or 'none'}"
            )
        self._waits(self._awaited())
        self._feed.wait(_LOOK_EVERY_S)

    def _awaited(self) -> str:
        """What has to happen before the update under way goes on."""
        found = [f"{job.kind} on {job.replica}" for job in self._crew.jobs()]
        if missing := self._arrivals.missing():
            found.append(f"{missing} groups to be sealed")
        if self._core(self._look()) is None:
            found.append("the core to be in training")
        if self._holding:
            found.append("groups that would be too old for the next")
        return f"update {self._update}: {', '.join(found) or 'work for who is there'}"
