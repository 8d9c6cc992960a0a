"""Groups on an execution host: failed executions are started again, and the group's limit ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cells.client import DaemonError
from storage.records import ExecutionOutcome, ExecutionResult, ExecutionSpec, QueryPlan, Split
from storage.run import Run
from tasks.rollout.group import find_result, run_groups
from tests.conftest import make_run

QUERY = QueryPlan(query_id="s00000-q0000", problem_id="p", split=Split.TRAIN, group_size=3)


class ScriptedHost:
    """Ends each execution as told: outcomes by member, one for each start; None runs on."""

    name = "executions"

    def __init__(self, run: Run, outcomes: dict[int, list[ExecutionOutcome | None]]) -> None:
        self._run = run
        self._outcomes = outcomes
        self.starts: list[str] = []
        self.finished: list[str] = []

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        limit_s: float = 1,
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        if path == "/ended":
            assert body is not None
            return {"states": {name: self._state(name) for name in body["names"]}}
        name = path.split("/")[2]
        if method == "PUT":
            spec = ExecutionSpec.model_validate(body)
            self.starts.append(name)
            outcome = self._outcomes[spec.member].pop(0)
            if outcome is not None:
                self._end(name, outcome)
        elif path.endswith("/finish"):
            self.finished.append(name)
            self._end(name, ExecutionOutcome.TIMED_OUT)
        return {"state": self._state(name)}

    def _state(self, name: str) -> str:
        return "running" if find_result(self._run, name) is None else "ended"

    def _end(self, name: str, outcome: ExecutionOutcome) -> None:
        result = ExecutionResult(
            execution_id=name,
            query_id=QUERY.query_id,
            outcome=outcome,
            started_at=0,
            ended_at=1,
            waited_s=0,
            exit_code=None,
            calls=1,
            workspace_key=None,
            detail="",
        )
        self._run.store.write_record(self._run.layout.execution_result(name), result)


DONE, FAILED = ExecutionOutcome.COMPLETED, ExecutionOutcome.HOST_FAILED


def outcomes_of(run: Run, host: ScriptedHost) -> tuple[list[str], list[str]]:
    """Outcomes by member, and the executions that were reported as ended."""
    ended: list[str] = []
    run_groups(run, host, [QUERY], 0, 1.0, ended.append, lambda: False)  # type: ignore[arg-type]
    results = [find_result(run, f"{QUERY.query_id}-e{member:03d}") for member in range(3)]
    return [result.outcome.value for result in results if result], ended


@pytest.mark.parametrize(
    ("replace", "last", "starts"),
    [(0, "host_failed", 3), (1, "host_failed", 4), (2, "completed", 5)],
)
def test_a_failed_execution_is_started_again_within_the_setting(
    tmp_path: Path, replace: int, last: str, starts: int
) -> None:
    run = make_run(tmp_path, f"rollout.replace_excluded={replace}")
    host = ScriptedHost(run, {0: [DONE], 1: [FAILED, FAILED, DONE], 2: [DONE]})
    found, ended = outcomes_of(run, host)
    assert found == ["completed", last, "completed"]
    assert len(host.starts) == starts
    assert len(ended) == len(set(ended)) == 3


def test_the_groups_limit_ends_what_runs_and_keeps_what_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path, "rollout.group_limit_s=0.5", "rollout.replace_excluded=3")
    host = ScriptedHost(run, {0: [DONE], 1: [None], 2: [None]})
    found, ended = outcomes_of(run, host)
    assert found == ["completed", "timed_out", "timed_out"]
    assert host.finished == [f"{QUERY.query_id}-e001", f"{QUERY.query_id}-e002"]
    assert len(host.starts) == len(ended) == 3


def test_one_that_runs_on_hides_no_other_that_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path, "rollout.group_limit_s=0.5")
    found, ended = outcomes_of(run, ScriptedHost(run, {0: [None], 1: [DONE], 2: [DONE]}))
    assert found == ["timed_out", "completed", "completed"]
    assert ended == [f"{QUERY.query_id}-e{member:03d}" for member in (1, 2, 0)]


def test_a_host_that_is_silent_for_a_moment_does_not_spoil_the_groups_limit(tmp_path: Path) -> None:
    class Silent(ScriptedHost):
        refusals = 2

        def call(self, method: str, path: str, *rest: Any, **more: Any) -> dict[str, Any]:
            if path.endswith("/finish") and self.refusals:
                self.refusals -= 1
                raise DaemonError("executions: no answer")
            return super().call(method, path, *rest, **more)

    run = make_run(tmp_path, "rollout.group_limit_s=0.5")
    host = Silent(run, {0: [DONE], 1: [None], 2: [None]})
    assert outcomes_of(run, host)[0] == ["completed", "timed_out", "timed_out"]
    assert host.finished == [f"{QUERY.query_id}-e001", f"{QUERY.query_id}-e002"]


def test_what_has_ended_is_not_started_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    outcomes_of(run, ScriptedHost(run, {0: [DONE], 1: [DONE], 2: [DONE]}))
    again = ScriptedHost(run, {})
    assert outcomes_of(run, again)[0] == ["completed"] * 3
    assert again.starts == []
