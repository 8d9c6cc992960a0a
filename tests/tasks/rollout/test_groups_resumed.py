"""A later attempt at a group waits for what runs, keeps what ended, and redoes what was lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cells.board import Board
from cells.client import DaemonClient, DaemonError
from storage.layout import execution_id
from storage.records import (
    ExecutionOutcome,
    ExecutionResult,
    ExecutionSpec,
    QueryPlan,
    Split,
)
from storage.run import Run
from tasks.rollout import executions
from tasks.rollout.execution import Surroundings
from tasks.rollout.executions import Executions, State
from tasks.rollout.group import run_groups, spec_of

pytestmark = pytest.mark.timeout(60)

QUERY = QueryPlan(query_id="s00000-q0000", problem_id="p", split=Split.TRAIN, group_size=3)
NAMES = [execution_id(QUERY.query_id, member) for member in range(QUERY.group_size)]


class FakeHost:
    """Knows which executions run; each ends when it is asked for it a second time."""

    name = "executions"

    def __init__(self, run: Run, running: list[str]) -> None:
        self.run = run
        self.running = running
        self.started: list[str] = []
        self.asked: Counter[str] = Counter()

    def call(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        if path == "/ended":
            return {"states": {name: self._state(name) for name in body["names"]}}
        name = path.rsplit("/", 1)[1]
        if method == "PUT":
            if name not in self.running:
                self.started.append(name)
                self.running.append(name)
            return {"state": "queued"}
        return {"state": self._state(name)}

    def _state(self, name: str) -> str:
        if name not in self.running:
            return "unknown"
        self.asked[name] += 1
        if self.asked[name] == 2:
            end(self.run, name)
        return "running" if self.asked[name] <= 2 else "ended"


def result_of(name: str, outcome: ExecutionOutcome) -> ExecutionResult:
    return ExecutionResult(
        execution_id=name,
        query_id=QUERY.query_id,
        outcome=outcome,
        started_at=0.0,
        ended_at=1.0,
        waited_s=0.0,
        exit_code=0,
        calls=0,
        workspace_key=None,
        detail="",
    )


def end(run: Run, name: str, outcome: ExecutionOutcome = ExecutionOutcome.COMPLETED) -> None:
    run.store.write_record(run.layout.execution_result(name), result_of(name, outcome))


def go(run: Run, host: FakeHost, board: Board) -> None:
    run_groups(
        run,
        cast(DaemonClient, host),
        [QUERY],
        0,
        1.0,
        ended=board.execution_ended,
        stopped=lambda: board.stopped,
    )


def calls_of(run: Run, name: str) -> str:
    return f"{run.layout.calls(name)}/00000000.jsonl"


def test_one_that_runs_keeps_the_calls_that_were_recorded(run_store: Run) -> None:
    run_store.store.write(calls_of(run_store, NAMES[0]), b"{}\n")
    run_store.store.write(calls_of(run_store, NAMES[1]), b"{}\n")
    host = FakeHost(run_store, [NAMES[0]])
    board = Board(live=NAMES, serve_version=0)
    go(run_store, host, board)
    assert host.started == NAMES[1:]
    assert run_store.store.exists(calls_of(run_store, NAMES[0]))
    # Those of a harness that has died are its new host's to delete: the gateway has to close their
    # journal first, or what follows would be written into a file that is deleted.
    assert run_store.store.exists(calls_of(run_store, NAMES[1]))
    assert board.live == 0


def test_one_that_ended_while_the_step_began_is_counted_once(run_store: Run) -> None:
    board = Board(live=NAMES, serve_version=0)
    end(run_store, NAMES[0])
    host = FakeHost(run_store, [])
    go(run_store, host, board)
    assert host.started == NAMES[1:]
    assert board.live == 0


def test_one_that_failed_on_our_side_is_run_again_until_its_group_is_sealed(
    run_store: Run,
) -> None:
    for name in NAMES:
        end(run_store, name, ExecutionOutcome.HOST_FAILED)
    host = FakeHost(run_store, [])
    failed: list[bool] = []
    call = host.call

    def seen(method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        if method == "PUT":
            key = run_store.layout.execution_result(path.rsplit("/", 1)[1])
            failed.append(run_store.store.exists(key))
        return call(method, path, body, **options)

    host.call = seen  # type: ignore[method-assign]
    go(run_store, host, Board(live=NAMES, serve_version=0))
    assert host.started == NAMES
    assert failed == [False] * len(NAMES), "the host would take it for one that has ended"
    for name in NAMES:
        end(run_store, name, ExecutionOutcome.HOST_FAILED)
    run_store.store.write(run_store.layout.group(QUERY.query_id), b"sealed")
    later = FakeHost(run_store, [])
    go(run_store, later, Board(live=[], serve_version=0))
    assert later.started == []


def test_a_host_that_forgets_is_an_error(run_store: Run) -> None:
    class Forgetful(FakeHost):
        def call(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
            if path == "/ended":
                return {"states": dict.fromkeys(body["names"], "unknown")}
            return {"state": "unknown"}

    with pytest.raises(DaemonError, match="has forgotten"):
        go(run_store, Forgetful(run_store, []), Board(live=NAMES, serve_version=0))


async def test_the_host_runs_one_anew_whose_result_was_taken_out_of_storage(
    run_store: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    async def carry_out(spec: ExecutionSpec, *_: Any) -> ExecutionResult:
        begun.append(spec.execution_id)
        return result_of(spec.execution_id, ExecutionOutcome.HOST_FAILED)

    monkeypatch.setattr(executions, "carry_out", carry_out)
    sessions = SimpleNamespace(watch=asyncio.Event().wait)
    host = Executions(run_store, cast(Surroundings, SimpleNamespace(sessions=sessions)))
    spec = spec_of(run_store, QUERY, 0, 0, 1.0)
    for _ in range(2):
        await host.submit(spec)
        entry = await host.find(spec.execution_id)
        assert entry is not None
        await entry.ended.wait()
        assert await host.submit(spec) is State.ENDED
        run_store.store.delete(run_store.layout.execution(spec.execution_id))
    assert begun == [spec.execution_id] * 2
    host._watching.cancel()
