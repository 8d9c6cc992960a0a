"""Runs that say they run, and nobody runs them."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Crashed, Pending, Running

from flows.roots import own_name
from flows.silence import LOOK_EVERY_S, SILENT_S, Silence, may_still_run, nobody_runs
from storage.hold import alone
from storage.objects import Store
from storage.run import Run
from tests.flows.test_attempt import HOLD


class _Server:
    def __init__(self) -> None:
        self.marked: list[tuple[Any, str]] = []

    def set_flow_run_state(self, flow_run: Any, state: State[Any], *, force: bool) -> None:
        assert force, "a server gives nobody else's run another state without it"
        self.marked.append((flow_run, str(state.name)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr("flows.silence.time.monotonic", lambda: now.s)
    return now


def running(**parameters: str) -> FlowRun:
    return FlowRun(
        id=uuid4(),
        flow_id=uuid4(),
        name="train x",
        run_count=1,
        state=Running(),
        parameters=parameters,
    )


def test_a_process_that_is_killed_is_seen_to_have_ended(run_store: Run) -> None:
    assert nobody_runs(run_store)
    command = [sys.executable, "-c", HOLD, run_store.store.url, run_store.layout.turn]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert not nobody_runs(run_store)
        process.kill()
    assert nobody_runs(run_store)


def test_a_run_that_nobody_runs_for_minutes_is_marked_as_crashed(
    run_store: Run, clock: SimpleNamespace
) -> None:
    server, told = _Server(), []
    client: Any = server
    silence, found = Silence(client, run_store, told.append), running()
    with alone(run_store.store, run_store.layout.turn):
        for _ in range(100):
            clock.s += LOOK_EVERY_S
            silence.see_to(found)
    looks = int(SILENT_S / LOOK_EVERY_S)
    for _ in range(looks):
        clock.s += LOOK_EVERY_S
        silence.see_to(found)
    assert server.marked == [], "it was seen for the first time less than this ago"
    clock.s += LOOK_EVERY_S / 2
    silence.see_to(found)
    assert server.marked == [], "it is looked at now and then"
    clock.s += LOOK_EVERY_S / 2
    silence.see_to(found)
    assert server.marked == [(found.id, "Crashed")]
    assert told == ["flow run train x says that it runs, and nobody runs it"]


def test_a_run_that_its_worker_took_and_never_began_is_given_to_the_next(
    run_store: Run, clock: SimpleNamespace
) -> None:
    server: Any = _Server()
    silence = Silence(server, run_store, lambda _: None)
    taken = running().model_copy(update={"state": Pending(), "run_count": 0})
    for _ in range(int(SILENT_S / LOOK_EVERY_S) + 1):
        clock.s += LOOK_EVERY_S
        silence.see_to(taken)
    assert server.marked == [(taken.id, "AwaitingRetry")]


def test_a_moment_with_somebody_and_an_end_count_from_anew(
    run_store: Run, clock: SimpleNamespace
) -> None:
    server: Any = _Server()
    silence, found = Silence(server, run_store, lambda _: None), running()
    ended = found.model_copy(update={"state": Completed()})
    for number in range(100):
        clock.s += LOOK_EVERY_S
        if number % 10 == 9:
            silence.see_to(ended)
        elif number % 10 == 4:
            with alone(run_store.store, run_store.layout.turn):
                silence.see_to(found)
        else:
            silence.see_to(found)
    assert server.marked == []


def test_who_may_still_run(run_store: Run) -> None:
    store = run_store.store
    found = running(run_id=run_store.run_id, root=store.url).model_copy(update={"state": Crashed()})
    assert not may_still_run(store, found)
    with alone(store, run_store.layout.turn):
        assert may_still_run(store, found)
    for changes in (
        {"name": "evaluate x"},
        {"parameters": {"run_id": run_store.run_id, "root": "/elsewhere"}},
        {"parameters": {"run_id": "never begun"}},
        {"parameters": {}},
    ):
        assert may_still_run(store, found.model_copy(update=changes)), changes
    assert may_still_run(Store("memory://there"), found), "its locks are each machine's own"
    assert own_name(found.id) == f"run-{str(found.id)[:8]}"
