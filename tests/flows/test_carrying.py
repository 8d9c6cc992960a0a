"""Groups that outlive their step: launched within a window, trained once, found again by whoever
goes on. Rollouts and their builds are stand-ins; the ledger, the training and the pace are real."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from cells.board import Board
from cells.paces import PaceRow
from cells.scheduler import Adaptive, GroupSeen, Pace, Spell
from cells.task import policy_of
from flows import carrying
from flows.carrying import CarriedRollouts, trained_groups
from flows.hosts import Hosts
from flows.plan import step_plan
from storage.journal import read_lines
from storage.layout import execution_id
from storage.records import (
    ExecutionOutcome,
    ExecutionResult,
    QueryPlan,
    StepDone,
    StepPlan,
    UpdateMetrics,
    decode,
    encode,
)
from storage.run import Run
from tasks.sampling.guard import ExclusionGuard
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.stream import train_stream
from tasks.training.task import keep_metrics
from tests.conftest import make_run
from tests.tasks.training.fakes import FakeReplica, World, make_group

LIMIT_S = 60.0
QUERIES, UPDATES, SIZE = 4, 2, 2
SETTINGS = (
    "cells.policy=adaptive",
    "cells.adaptive.always=true",
    f"rollout.queries={QUERIES}",
    f"rollout.group_size={SIZE}",
    f"training.updates_per_step={UPDATES}",
    "training.steps=3",
    "training.micro_step_tokens=32",
)
WINDOW = 3
"""Updates' worth of groups, 2, times the mean staleness of bursts and 1.1."""


class Future:
    """As much of a future of Prefect's as is asked for."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[Any], None]] = []
        self._value: Any = None
        self._error: BaseException | None = None

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._value, self._error = value, error
            self._done.set()
        for call in self._calls:
            call(self)

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        with self._lock:
            if not self._done.is_set():
                self._calls.append(call)
                return
        call(self)

    def wait(self) -> None:
        assert self._done.wait(LIMIT_S)

    def result(self) -> Any:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


@dataclass
class Site:
    """A run whose executions end when the test says so."""

    run: Run
    core: FakeReplica
    slow: set[str] = field(default_factory=set)
    """Queries whose executions end in a later step than that which launched them."""
    launched: list[str] = field(default_factory=list)
    """In order, also those that a later step takes up again."""
    waiting: dict[str, Future] = field(default_factory=dict)
    board: Board | None = None
    most: int = 0
    """Groups that were launched and not trained, at most."""

    def submit(self, run: Run, root: str, hosts: Hosts, board: Board, batch: Any, *_: Any) -> Any:
        (query,) = batch
        future = Future()
        if query.query_id not in self.launched:
            self.launched.append(query.query_id)
        done = sum(len(trained_groups(self.run, step)) for step in range(3))
        self.most = max(self.most, len(self.launched) - done)
        if query.query_id in self.slow:
            self.slow.discard(query.query_id)
            threading.Thread(target=self._leave, args=(future, board)).start()
        else:
            self._end(query)
            for member in range(SIZE):
                board.execution_ended(execution_id(query.query_id, member))
            future.finish(True)
        return future

    def _leave(self, future: Future, board: Board) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not (board.released or board.stopped) and time.monotonic() < deadline:
            board.wait_change(0.1)
        future.finish(False)

    def _end(self, query: QueryPlan) -> None:
        for member in range(SIZE):
            name = execution_id(query.query_id, member)
            result = ExecutionResult(
                execution_id=name,
                query_id=query.query_id,
                outcome=ExecutionOutcome.COMPLETED,
                started_at=time.time() - 10,
                ended_at=time.time(),
                waited_s=0.0,
                exit_code=0,
                calls=1,
                workspace_key=None,
                detail="",
            )
            self.run.store.write_record_once(self.run.layout.execution_result(name), result)

    def build(
        self,
        root: str,
        run_id: str,
        step: int,
        query: QueryPlan,
        feed: GroupFeed,
        guard: ExclusionGuard,
        board: Board,
        settled: Any,
    ) -> Future:
        assert query.query_id.startswith(f"s{step:05d}-"), "a group belongs to its own plan"
        number = int(query.query_id[-4:])
        version = board.serve_version
        with guard.turn():
            guard.admit(query.query_id, 0)
            make_group(self.run.store, number, version=version, step=step, layout=self.run.layout)
            feed.put(query.query_id)
        future = Future()
        future.finish(query.query_id)
        return future

    def step(self, step: int, dies_after: int | None = None) -> StepDone | None:
        """One attempt at a step, as ``rl_step`` makes it. It may die when it has trained some of
        its updates."""
        run = self.run
        plan = step_plan(run, step, self.core.version)
        board = Board(live=(), serve_version=self.core.version, expected=QUERIES, newer=True)
        feed, training = GroupFeed(), Future()

        def updated(metrics: UpdateMetrics) -> None:
            keep_metrics(run, step, metrics.update + 1)
            board.serve(metrics.policy_version)
            board.updated(metrics.policy_version)
            if dies_after is not None and metrics.update + 1 >= dies_after:
                raise KilledError

        def train() -> None:
            try:
                train_stream(
                    store=run.store,
                    layout=run.layout,
                    config=run.config,
                    step=step,
                    groups=QUERIES,
                    feed=feed,
                    members=lambda: [self.core],
                    spent=lambda: Spent(0.0, 0.0),
                    on_update=updated,
                    carries=True,
                )
                training.finish(self.core.version)
            except BaseException as error:
                board.fail(error)
                training.finish(error=error)

        policy = policy_of(run.config)
        assert isinstance(policy, Adaptive)
        thread = threading.Thread(target=train)
        thread.start()
        hosts = cast(Hosts, None)
        try:
            rollouts = CarriedRollouts(run, "", hosts, board, feed, plan, policy)
            version = rollouts.run(cast(Any, training))
        except KilledError:
            return None
        finally:
            board.stop()
            thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert board.pace is Pace.CARRY
        done = StepDone(step=step, policy_version=version, seconds=1.0, carried=rollouts.carried())
        run.store.write_record_once(run.layout.step_done(step), done)
        return done


class KilledError(RuntimeError):
    """The process of the flow is gone."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    run = make_run(tmp_path, *SETTINGS)
    world = World(run.store)
    world.checkpoint = (0, *world.checkpoint[1:])
    found = Site(run, FakeReplica(world, "a", core=True))
    monkeypatch.setattr(carrying, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(carrying, "submit_rollout", found.submit)
    monkeypatch.setattr(carrying, "is_unscored", lambda *_: False)
    monkeypatch.setattr(carrying, "wait", lambda futures: [one.wait() for one in futures])

    class Build:
        submit = staticmethod(found.build)

    monkeypatch.setattr(carrying, "build_samples", Build)
    return found


def names(*pairs: tuple[int, int]) -> set[str]:
    return {f"s{step:05d}-q{index:04d}" for step, index in pairs}


def every(steps: int) -> set[str]:
    return names(*((step, index) for step in range(steps) for index in range(QUERIES)))


def test_a_slow_group_is_trained_in_the_next_step_and_each_group_once(site: Site) -> None:
    site.slow = names((0, 1))
    done = site.step(0)
    assert done is not None and names((0, 1)) <= set(done.carried)
    assert names((0, 1)).isdisjoint(trained_groups(site.run, 0))
    assert site.step(1) is not None
    assert names((0, 1)) <= trained_groups(site.run, 1)
    last = site.step(2)
    assert last is not None and last.carried == ()
    steps = [trained_groups(site.run, step) for step in range(3)]
    assert [len(groups) for groups in steps] == [QUERIES] * 3
    assert set().union(*steps) == every(3)
    assert site.launched == sorted(every(3)), "in the order of the plans"
    assert site.most <= WINDOW
    assert site.core.version == 3 * UPDATES


@pytest.mark.parametrize("seed", range(4))
def test_whoever_dies_each_group_is_trained_once(site: Site, seed: int) -> None:
    chance = random.Random(seed)
    for step in range(3):
        planned = [f"s{step:05d}-q{index:04d}" for index in range(QUERIES)]
        if step < 2:
            site.slow |= set(chance.sample(planned, chance.randint(0, 1)))
        if chance.random() < 0.5:
            site.step(step, dies_after=1)
        assert site.step(step) is not None
    steps = [trained_groups(site.run, step) for step in range(3)]
    assert [len(groups) for groups in steps] == [QUERIES] * 3
    assert set().union(*steps) == every(3)
    assert site.core.version == 3 * UPDATES


def test_what_was_chosen_is_found_again(site: Site) -> None:
    site.step(0)
    site.step(1)
    lines = read_lines(site.run.store, site.run.layout.paces)
    rows = [decode(line, PaceRow) for line in lines]
    assert {row.pace for row in rows} == {Pace.CARRY}
    assert [row.step for row in rows] == sorted(row.step for row in rows)
    assert rows[-1].updates >= UPDATES
    assert 0 < sum(len(row.ended) for row in rows) <= len(site.launched)
    assert rows[-1].worked_s >= 1.0, "the seconds of the step before count"


def test_a_row_keeps_what_it_was_chosen_by() -> None:
    group = GroupSeen(10.0, 2.0, 8.0, timed_out=False)
    spell = Spell(2, 5.0, 1.0, [group, group], staleness=0.5, running=1)
    row = PaceRow(
        at=1.0,
        worked_s=2.0,
        step=0,
        updates=1,
        busy_s=3.0,
        pace=Pace.CARRY,
        window=5,
        serving_cells=1,
        may_wait=0.2,
        reason="because",
        ended=(group,),
        bursts=spell,
    )
    read = decode(encode(row), PaceRow)
    assert read == row
    choice = read.choice(1)
    assert choice.bursts == spell and choice.bursts.lag_s == 2.0
    assert (choice.pacing.window, choice.groups) == (5, 1)


def test_the_plan_of_the_next_step_is_made_when_its_first_query_is_launched(site: Site) -> None:
    site.step(0)
    plan = site.run.store.read_record(site.run.layout.step_plan(1), StepPlan)
    assert plan.policy_version > 0
    assert not site.run.store.exists(site.run.layout.step_plan(2))
