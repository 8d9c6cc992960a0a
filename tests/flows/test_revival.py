"""Which crashed flow runs are run again, and how often that is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from httpx import ConnectError
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Crashed

from flows.revival import (
    FIRST_REPORT,
    LOOK_EVERY_S,
    PATIENCE_S,
    RETRIES,
    SECOND_REPORT_S,
    SETTLE_S,
    CrashWatch,
    Revival,
)


class _Server:
    """Takes requests for retries; its runs stay as they are."""

    def __init__(self, *runs: FlowRun) -> None:
        self.runs = runs
        self.below: dict[UUID, FlowRun] = {}
        """Runs that a run had under way, by its id."""
        self.asked: list[tuple[Any, str]] = []
        self.away = False

    def set_flow_run_state(self, flow_run: Any, state: State[Any], *, force: bool = False) -> None:
        if self.away:
            raise ConnectError("away")
        assert state.is_crashed() if force else state.is_scheduled()
        self.asked.append((flow_run, str(state.name)))

    def read_flow_runs(self, *, flow_run_filter: FlowRunFilter, **_: Any) -> tuple[FlowRun, ...]:
        if self.away:
            raise ConnectError("away")
        if parents := flow_run_filter.parent_flow_run_id:
            return tuple(self.below[one] for one in parents.any_ or () if one in self.below)
        return self.runs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr("flows.revival.time.monotonic", lambda: now.s)
    return now


def crashed(attempt: int, message: str = "exited") -> FlowRun:
    return FlowRun(
        id=uuid4(),
        flow_id=uuid4(),
        name="train x",
        run_count=attempt,
        state=Crashed(message=message),
    )


def test_a_crashed_run_is_run_again_a_few_times(clock: SimpleNamespace) -> None:
    told: list[str] = []
    server: Any = _Server()
    seen = Revival(server, told.append)
    found = crashed(1)
    for attempt in range(1, RETRIES + 1):
        assert seen.see_to(found.model_copy(update={"run_count": attempt}))
        clock.s += SETTLE_S
    assert not seen.see_to(found.model_copy(update={"run_count": RETRIES + 1}))
    assert server.asked == [(found.id, "AwaitingRetry")] * RETRIES
    assert told[0] == "flow run train x has crashed (exited): it is run again, 1 of 5 times"
    assert len(told) == RETRIES


def test_what_a_crashed_run_had_under_way_gives_its_place_back_first(
    clock: SimpleNamespace,
) -> None:
    """The retry waits for that place. A worker that was killed as well has not given it back."""
    server: Any = _Server()
    found, step = crashed(1), crashed(1)
    server.below[found.id] = step
    assert Revival(server, lambda _: None).see_to(found)
    assert server.asked == [(step.id, "Crashed"), (found.id, "AwaitingRetry")]


def test_a_retry_that_the_worker_took_back_is_asked_for_again(clock: SimpleNamespace) -> None:
    told: list[str] = []
    server: Any = _Server()
    seen, found = Revival(server, told.append), crashed(1)
    for _ in range(3):
        assert seen.see_to(found)
        clock.s += SETTLE_S / 2
    assert len(server.asked) == 2 and len(told) == 1
    clock.s += PATIENCE_S
    assert not seen.see_to(found), "nobody runs it"


def test_the_workers_last_word_is_waited_for(clock: SimpleNamespace) -> None:
    told: list[str] = []
    server: Any = _Server()
    seen = Revival(server, told.append)
    first, last = crashed(1, f"{FIRST_REPORT}: -9"), Crashed(message="Flow run infrastructure ...")
    assert seen.see_to(first), "it is going to be run again"
    assert server.asked == [] and told == []
    clock.s += 50
    assert seen.see_to(first.model_copy(update={"state": last}))
    assert len(server.asked) == len(told) == 1
    alone = crashed(1, f"{FIRST_REPORT}: -9")
    assert seen.see_to(alone)
    clock.s += SECOND_REPORT_S
    assert seen.see_to(alone), "that worker says no more"
    assert len(server.asked) == 2


def test_what_did_not_crash_or_never_began_is_left(clock: SimpleNamespace) -> None:
    server: Any = _Server()
    seen = Revival(server, lambda _: None)
    assert not seen.see_to(crashed(0))
    assert not seen.see_to(crashed(1).model_copy(update={"state": Completed()}))
    assert server.asked == []


def test_a_watch_leaves_old_and_silent_runs_and_bears_a_server_that_is_away(
    clock: SimpleNamespace,
) -> None:
    old = crashed(1)
    server: Any = _Server()
    watch = CrashWatch(server, "gyre", lambda found: found is silent, lambda _: None)
    silent, killed = crashed(1), crashed(1)
    server.runs = (old, silent, killed)
    watch.look()
    assert server.asked == [], "it is not time yet"
    clock.s += LOOK_EVERY_S
    server.away = True
    watch.look()
    server.away = False
    clock.s += LOOK_EVERY_S
    watch.look()
    assert server.asked == [(killed.id, "AwaitingRetry")]
