"""Rollouts of a step whose groups may outlive it.

Groups of a run have one order: as the plans of its steps have them. They are launched in it, as
many as the pace allows, also those of the next step's plan. Each step trains as many groups as
every other, whichever these are; what runs or waits when it is trained is carried over into the
next step, which finds it by its name: executions go on in their host, under each new version.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prefect.futures import PrefectFuture, wait
from prefect.utilities.annotations import allow_failure

from cells.board import Board, Outlook
from cells.gateway.recording import SessionRecord
from cells.scheduler import Adaptive
from flows.hosts import Hosts
from flows.pacing import RunPace
from flows.plan import step_plan
from flows.rollouts import is_unscored, living, scoring_task, submit_rollout
from storage.journal import read_journal
from storage.layout import execution_id
from storage.objects import MissingObjectError
from storage.records import Excluded, QueryPlan, StepDone, StepPlan, decode
from storage.run import Run
from storage.samples import read_header
from tasks.sampling.guard import ExclusionGuard
from tasks.sampling.task import build_samples
from tasks.training.events import Arrived, LedgerLine
from tasks.training.feed import GroupFeed

_LOOK_EVERY_S = 0.5


@dataclass
class _Group:
    """A query that may be launched, and where it is."""

    query: QueryPlan
    step: int
    """Whose plan has it."""
    launched: bool = False
    version: int = 0
    """Of the weights when it was launched."""
    sealed: bool = False


class CarriedRollouts:
    """Launches, scores and builds what a step may train, until it is trained.

    Args:
        plan: of the step.
        board: serves the newest weights that a checkpoint holds.
    """

    def __init__(
        self,
        run: Run,
        root: str,
        hosts: Hosts,
        board: Board,
        feed: GroupFeed,
        plan: StepPlan,
        policy: Adaptive,
    ) -> None:
        self._run = run
        self._root = root
        self._hosts = hosts
        self._board = board
        self._feed = feed
        self._plan = plan
        self._groups = _candidates(run, plan)
        self._before = plan.step * run.config.rollout.queries
        """Groups of the run that earlier steps have trained."""
        queries = run.config.rollout.queries
        self._guard = ExclusionGuard(
            (queries,), run.config.rollout.group_size, run.config.scoring.max_excluded_share
        )
        self._score = scoring_task(run)
        recent = [group.query for group in self._groups]
        if plan.step:
            recent += _plan(run, plan.step - 1).queries
        known = {query.query_id: query for query in recent}
        self._pace = RunPace(run, plan.step, policy, board, known.values())
        self._ended: deque[tuple[_Group, PrefectFuture[Any]]] = deque()
        """Rollouts that have ended, told by other threads."""
        self._built: deque[tuple[_Group, PrefectFuture[Any]]] = deque()
        """Builds likewise."""
        self._rollouts: list[PrefectFuture[bool]] = []
        self._scores: list[PrefectFuture[None]] = []
        self._builds: list[PrefectFuture[str]] = []
        self._updates = -1

    def run(self, training: PrefectFuture[int]) -> int:
        """Until the step is trained; the version that it ends with.

        Raises:
            Exception: what a rollout, a build or the training failed with.
        """
        over = threading.Event()
        training.add_done_callback(lambda _: over.set())
        self._adopt()
        while not over.is_set():
            self._keep_pace()
            self._settle()
            self._board.wait_change(_LOOK_EVERY_S)
            self._board.check()
        version = training.result()
        self._board.release()
        wait(self._rollouts)
        wait(self._scores)
        wait(self._builds)
        for rollout in self._rollouts:
            rollout.result()
        for build in self._builds:
            build.result()
        return version

    def carried(self) -> tuple[str, ...]:
        """Queries that were launched and are trained in a later step."""
        trained = trained_groups(self._run, self._plan.step)
        launched = (group.query.query_id for group in self._groups if group.launched)
        return tuple(query for query in launched if query not in trained)

    def _adopt(self) -> None:
        """Take up what earlier steps and attempts have launched."""
        sealed = []
        for group in self._groups:
            key = self._run.layout.group(group.query.query_id)
            if self._run.store.exists(key):
                group.launched = group.sealed = True
                sealed.append(read_header(self._run.store, key))
        for header in sorted(sealed, key=lambda header: header.sealed_at):
            self._guard.count(sum(isinstance(one.verdict, Excluded) for one in header.members))
            self._feed.put(header.query_id)
        for group in self._groups:
            if not group.sealed and (group.launched or self._was_begun(group.query)):
                self._launch(group)

    def _was_begun(self, query: QueryPlan) -> bool:
        folder = self._run.layout.execution(execution_id(query.query_id, 0))
        return bool(self._run.store.children(folder))

    def _keep_pace(self) -> None:
        """Launch what the pace allows, asked again after each update."""
        if self._board.updates != self._updates:
            self._updates = self._board.updates
            self._pace.refresh()
            if self._launched < self._total:
                running = [group.query for group in self._running()]
                self._pace.choose(self._launched, running)
            allowed = self._pace.allowed(self._launched)
            while self._launched < allowed:
                group = self._next()
                if group is None:
                    break
                self._launch(group)
        self._tell()

    def _next(self) -> _Group | None:
        """The next to be launched; None where all of this step's and the next one's are."""
        found = next((group for group in self._groups if not group.launched), None)
        step = self._plan.step + 1
        if found is None and self._groups[-1].step < step < self._run.config.training.steps:
            plan = step_plan(self._run, step, self._board.serve_version)
            self._groups += [_Group(query, step) for query in plan.queries]
            found = self._groups[-len(plan.queries)]
        return found

    def _launch(self, group: _Group) -> None:
        query, version = group.query, self._board.serve_version
        group.launched = True
        group.version = min([version, *_opened_with(self._run, query)])
        self._board.launch(living(self._run, [query]), version)
        temperature = self._run.config.rollout.temperature
        future = submit_rollout(
            self._run, self._root, self._hosts, self._board, (query,), version, temperature
        )
        self._rollouts.append(future)
        self._note(self._ended, group, future)

    def _note(
        self,
        where: deque[tuple[_Group, PrefectFuture[Any]]],
        group: _Group,
        future: PrefectFuture[Any],
    ) -> None:
        """Keep a future there as soon as it is done."""
        future.add_done_callback(lambda _: where.append((group, future)))

    def _settle(self) -> None:
        """Score and build what has ended, and look for failures."""
        while self._ended:
            group, future = self._ended.popleft()
            if not future.result():
                continue
            query = group.query
            self._pace.ended(query)
            settled: Any = None
            if is_unscored(self._run, (query,)):
                score = self._score((query,), self._root, self._board)
                self._scores.append(score)
                # A score that failed for good leaves its execution out.
                settled = allow_failure(score)
            build = build_samples.submit(
                self._root,
                self._run.run_id,
                group.step,
                query,
                self._feed,
                self._guard,
                self._board,
                settled,
            )
            self._builds.append(build)
            self._note(self._built, group, build)
        while self._built:
            group, build = self._built.popleft()
            build.result()
            group.sealed = True

    def _running(self) -> list[_Group]:
        return [group for group in self._groups if group.launched and not group.sealed]

    @property
    def _launched(self) -> int:
        """Groups of the run that were launched."""
        return self._before + sum(group.launched for group in self._groups)

    @property
    def _total(self) -> int:
        return self._run.config.training.steps * self._run.config.rollout.queries

    def _tell(self) -> None:
        """What follows for the cells."""
        size = self._run.config.rollout.group_size
        self._board.set_outlook(
            Outlook(
                pacing=self._pace.pacing,
                oldest=min((group.version for group in self._running()), default=None),
                coming=size * self._pace.coming(self._launched),
                last=self._launched == self._total,
            )
        )


def trained_groups(run: Run, step: int) -> set[str]:
    """Queries of the groups that belong to an update of a step."""
    prefix = run.layout.ledger(step)
    lines = (decode(line, LedgerLine, where=prefix) for line in read_journal(run.store, prefix))
    return {line.event.group for line in lines if isinstance(line.event, Arrived)}


def _plan(run: Run, step: int) -> StepPlan:
    return run.store.read_record(run.layout.step_plan(step), StepPlan)


def _candidates(run: Run, plan: StepPlan) -> list[_Group]:
    """What the step before has left, and the plan's own queries that it has not trained, in the
    order of launches."""
    if not plan.step:
        return [_Group(query, plan.step) for query in plan.queries]
    done = run.store.read_record(run.layout.step_done(plan.step - 1), StepDone)
    trained, carried = trained_groups(run, plan.step - 1), set(done.carried)
    found = [
        _Group(query, plan.step, launched=query.query_id in carried)
        for query in plan.queries
        if query.query_id not in trained
    ]
    left = carried - {query.query_id for query in plan.queries}
    for step in range(plan.step - 1, -1, -1):
        if not left:
            break
        own = [query for query in _plan(run, step).queries if query.query_id in left]
        found = [*(_Group(query, step, launched=True) for query in own), *found]
        left -= {query.query_id for query in own}
    return found


def _opened_with(run: Run, query: QueryPlan) -> Iterator[int]:
    """The weights that executions of a query were opened with, where they were."""
    for member in range(query.group_size):
        key = run.layout.session(execution_id(query.query_id, member))
        with suppress(MissingObjectError):
            yield run.store.read_record(key, SessionRecord).policy_version
