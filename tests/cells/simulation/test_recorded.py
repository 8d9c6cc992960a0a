"""A recorded run becomes a workload whose numbers are those that the run recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cells.decisions import Decision
from cells.scheduler import POLICY_NAMES
from cells.simulation.compare import policy_for
from cells.simulation.engine import simulate
from cells.simulation.recorded import (
    RecordedRunError,
    RecordedTimes,
    recorded_times,
    workload_from_run,
)
from cells.simulation.workload import Origin, RecordedDurations
from configs.load import load_config
from flows.simulate_cli import register
from storage.journal import Journal, append_line
from storage.layout import execution_id, query_id
from storage.records import (
    Call,
    CallKind,
    CallStatus,
    ExecutionOutcome,
    ExecutionResult,
    QueryPlan,
    Split,
    StepPlan,
    UpdateMetrics,
    VersionSpan,
    encode,
)
from storage.run import Run, create_run

QUERIES, MEMBERS, UPDATES, STEPS = 4, 4, 2, 2


def record_run(root: Path, *settings: str) -> Run:
    """Two colocated steps: every execution runs for 10 s, of which two calls of 3 s each."""
    chosen = ["cells.policy=colocate", *settings]
    run = create_run(str(root), "recorded", load_config("smoke", chosen, environment={}))
    for step in range(STEPS):
        queries = tuple(
            QueryPlan(
                query_id=query_id(step, index),
                problem_id=f"p{index}",
                split=Split.TRAIN,
                group_size=MEMBERS,
            )
            for index in range(QUERIES)
        )
        plan = StepPlan(step=step, policy_version=step * UPDATES, queries=queries)
        run.store.write_record(run.layout.step_plan(step), plan)
        for query in queries:
            for member in range(MEMBERS):
                record_execution(run, query.query_id, execution_id(query.query_id, member))
        for update in range(UPDATES):
            append_line(run.store, run.layout.metrics, encode(metrics(step, update)))
    record_switches(run)
    return run


def record_execution(run: Run, query: str, name: str) -> None:
    failed = name == execution_id(query_id(1, 0), 0)
    result = ExecutionResult(
        execution_id=name,
        query_id=query,
        outcome=ExecutionOutcome.HOST_FAILED if failed else ExecutionOutcome.COMPLETED,
        started_at=100.0,
        ended_at=112.0,
        waited_s=2.0,
        exit_code=0,
        calls=2,
        workspace_key=None,
        detail="",
    )
    run.store.write_record(run.layout.execution_result(name), result)
    journal = Journal(run.store, run.layout.calls(name))
    journal.append([encode(call(name, 0, 40)), encode(call(name, 1, 10))])
    journal.close()


def call(execution: str, index: int, prompt: int) -> Call:
    return Call(
        call_id=f"{execution}-{index}",
        execution_id=execution,
        index=index,
        parent=f"{execution}-{index - 1}" if index else None,
        kept=0,
        new_ids=(1,) * prompt,
        output_ids=(2,) * 30,
        output_logprobs=(-1.0,) * 30,
        spans=(VersionSpan(version=0, start=0, end=30),),
        kind=CallKind.MAIN,
        kind_reason="",
        agent="main",
        status=CallStatus.COMPLETE,
        finish_reason="stop",
        fork_reason=None,
        started_at=100.0,
        waited_s=1.0,
        seconds=4.0,
        cell="a",
        cached_tokens=0,
    )


def metrics(step: int, update: int) -> UpdateMetrics:
    return UpdateMetrics.model_validate(
        {
            **dict.fromkeys(UpdateMetrics.model_fields, 0),
            "logprob_gap_by_version": {},
            "step": step,
            "update": update,
            "trained_tokens": 8192,
            "rollout_s": 12.0,
            "train_s": 5.0,
            "switch_s": 2.0,
            "ended_at": 140.0 + 20 * step + update,
        }
    )


def record_switches(run: Run) -> None:
    journal = Journal(run.store, run.layout.decisions)
    for to, seconds, failed in (("training", 2.0, ""), ("training", 4.0, ""), ("rollout", 1.0, "")):
        decision = Decision(
            at=0, step=0, cell="a", to=to, reason="", waterlevel=0, seconds=seconds, failed=failed
        )
        journal.append([encode(decision)])
    journal.close()


def test_the_workload_has_the_recorded_numbers(tmp_path: Path) -> None:
    workload = workload_from_run(record_run(tmp_path))
    durations = workload.durations
    assert isinstance(durations, RecordedDurations)
    assert set(durations.seconds) == {"p0", "p1", "p2", "p3"}
    # A host that failed says nothing about durations.
    assert durations.seconds["p0"] == (10.0,) * (MEMBERS * STEPS - 1)
    assert workload.execution.timeout_s == 30
    assert workload.execution.tool_share == pytest.approx(0.4)
    assert workload.execution.block_s == pytest.approx(5.0)
    assert workload.execution.first_prompt_tokens == 40
    assert workload.execution.prompt_per_output == pytest.approx(10 / 60)
    assert workload.serving.speed(workload.serving.nominal_requests) == pytest.approx(
        (60 + 50 / 10) / 6
    )
    assert (workload.cells.to_training_s, workload.cells.to_rollout_s) == (3.0, 1.0)
    executions = QUERIES * MEMBERS * STEPS - 1
    assert workload.training.tokens_per_s == pytest.approx(executions * 110 / 20.0 / 2)
    assert workload.batch.updates == STEPS * UPDATES
    assert not workload.of_origin(Origin.FITTED)
    assert workload.sources["serving.kv_kept_on_reroute"].origin is Origin.ASSUMED


def test_a_simulated_recording_trains_as_long_as_the_run_did(tmp_path: Path) -> None:
    workload = workload_from_run(record_run(tmp_path))
    outcome = simulate(workload, policy_for(workload, "colocate"))
    # 20 s on two replicas, and one execution more than was recorded.
    assert outcome.training_busy_s == pytest.approx(40.0 * 32 / 31, rel=0.01)


def test_the_recorded_times_stand_beside_the_simulated_ones(tmp_path: Path) -> None:
    times = recorded_times(record_run(tmp_path))
    # From 100.0, when the first execution started, to the last update of the second step.
    assert times == RecordedTimes("colocate", 61.0, 48.0, 20.0, 8.0)


def test_gyre_simulates_a_recorded_run(tmp_path: Path) -> None:
    record_run(tmp_path)
    app = typer.Typer()
    register(app)
    arguments = ["simulate", "--from-run", "recorded", "--root", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, [*arguments, "--seeds", "1"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["workload"] == "recorded"
    assert found["recorded"]["wall_s"] == 61
    table = CliRunner().invoke(app, [*arguments[:-1], "--seeds", "1"])
    assert "recorded under colocate: 61.0 s" in " ".join(table.stdout.split())
    assert set(found["policies"]) == set(POLICY_NAMES)
    missing = CliRunner().invoke(app, [*arguments[:2], "nothing", *arguments[3:]])
    assert missing.exit_code == 2
    assert "no run 'nothing'" in missing.stderr


def test_a_run_that_trained_nothing_is_refused(tmp_path: Path) -> None:
    run = create_run(str(tmp_path), "empty", load_config("smoke", environment={}))
    with pytest.raises(RecordedRunError, match="0 ended executions, 0 model calls and 0 updates"):
        workload_from_run(run)
