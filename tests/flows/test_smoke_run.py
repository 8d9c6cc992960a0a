"""A whole real run: real Prefect, SGLang, Megatron-core and Mooncake on two cores."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from cells.checkpoint import latest_checkpoint
from cells.host.replica import replica_settings
from cells.replica.client import ReplicaClient
from flows.history import evaluations_of, updates_of
from flows.plan import step_plan
from storage.journal import read_journal
from storage.layout import execution_id
from storage.objects import Store
from storage.records import (
    Call,
    CallKind,
    ExecutionOutcome,
    ExecutionResult,
    Scored,
    VerdictRecord,
    decode,
)
from storage.run import Run
from storage.samples import read_group
from tasks.warm_start.build import policy_key
from tests.flows.conftest import FinishedRun

pytestmark = [pytest.mark.real, pytest.mark.timeout(1000)]


def executions(run: Run) -> list[str]:
    return [
        execution_id(query.query_id, member)
        for step in range(run.config.training.steps)
        for query in step_plan(run, step, 0).queries
        for member in range(query.group_size)
    ]


def test_every_update_left_a_whole_line_of_metrics(smoke_run: FinishedRun) -> None:
    run = smoke_run.run
    updates = updates_of(run)
    training = run.config.training
    expected = [
        (step, update)
        for step in range(training.steps)
        for update in range(training.updates_per_step)
    ]
    assert [(line.step, line.update) for line in updates] == expected
    versions = [line.policy_version for line in updates]
    assert versions == sorted(versions)
    for line in updates:
        assert line.executions == line.valid + line.excluded
        assert line.staleness_max <= run.config.staleness.max
        assert line.computed_tokens is not None
        assert line.computed_tokens <= line.trained_tokens
    assert sum(line.executions for line in updates) == len(executions(run))
    assert sum(line.computed_tokens or 0 for line in updates) < sum(
        line.trained_tokens for line in updates
    ), "samples of a group share their instruction, and it is computed once"


def test_every_execution_ended_and_was_scored_once(smoke_run: FinishedRun) -> None:
    run = smoke_run.run
    for name in executions(run):
        result = run.store.read_record(run.layout.execution_result(name), ExecutionResult)
        assert result.outcome is not ExecutionOutcome.HOST_FAILED, result.detail
        verdicts = run.store.children(run.layout.verdicts(name))
        assert len(verdicts) == 1
        key = f"{run.layout.verdicts(name)}/{verdicts[0]}"
        verdict = run.store.read_record(key, VerdictRecord).verdict
        assert isinstance(verdict, Scored)


def calls_of(run: Run, execution: str) -> dict[str, Call]:
    lines = read_journal(run.store, run.layout.calls(execution))
    return {call.call_id: call for call in (decode(line, Call) for line in lines)}


def all_ids(call: Call, calls: dict[str, Call]) -> list[int]:
    """Prompt and output of a call, put together from what each call added."""
    before = all_ids(calls[call.parent], calls) if call.parent else []
    assert call.kept <= len(before)
    return [*before[: call.kept], *call.new_ids, *call.output_ids]


def test_a_continued_call_begins_with_all_that_it_continues(smoke_run: FinishedRun) -> None:
    run = smoke_run.run
    continued = 0
    for name in executions(run):
        calls = calls_of(run, name)
        for call in calls.values():
            assert len(call.output_ids) == len(call.output_logprobs) > 0
            if call.parent is not None:
                parent = calls[call.parent]
                assert call.kept == len(all_ids(parent, calls))
                continued += 1
    assert continued > len(executions(run))


def test_histories_branch(smoke_run: FinishedRun) -> None:
    kinds = {
        call.kind
        for name in executions(smoke_run.run)
        for call in calls_of(smoke_run.run, name).values()
    }
    assert {CallKind.MAIN, CallKind.MAIN_SUMMARY} <= kinds


async def test_the_trainer_computes_every_recorded_log_prob(
    smoke_run: FinishedRun, tmp_path: Path
) -> None:
    """All targets of step 0, which the first policy sampled, by that policy in Megatron, in rows
    that hold shared prefixes once."""
    run = smoke_run.run
    samples = []
    for query in step_plan(run, 0, 0).queries:
        key = run.layout.group(query.query_id)
        group = read_group(run.store, key)
        samples += [{"group_key": key, "index": index} for index in range(len(group.samples))]
    settings = replica_settings(run.config, root=run.store.url, cell=run.config.cells.cells[1])
    assert settings.share_prefixes
    replica = await ReplicaClient.start(settings, log=tmp_path / "replica.log", limit_s=120)
    try:
        policy = str(run.store.local_path(policy_key(run.config)))
        await replica.call("load", {"path": policy, "version": 0})
        found = await replica.call("logprobs", {"samples": samples})
    finally:
        await replica.close()
    assert found["tokens"] > 100
    assert found["gap_max"] < 1e-3


def test_each_sampled_token_is_a_target_once(smoke_run: FinishedRun) -> None:
    run = smoke_run.run
    cap = run.config.trajectory.cap
    assert cap is not None
    for step in range(run.config.training.steps):
        for query in step_plan(run, step, 0).queries:
            group = read_group(run.store, run.layout.group(query.query_id))
            assert len(group.header.members) == query.group_size
            for member in group.header.members:
                own = [s for s in group.samples if s.execution_id == member.execution_id]
                assert len(own) <= cap
                if not own:
                    continue
                assert sum(sample.weight for sample in own) == pytest.approx(1)
                sampled = sum(
                    len(call.output_ids) for call in calls_of(run, member.execution_id).values()
                )
                targets = sum(int(sample.targets.sum()) for sample in own)
                assert targets + member.dropped_tokens + member.cut_tokens == sampled


def test_the_proof_names_real_parts(smoke_run: FinishedRun) -> None:
    run = smoke_run.run
    proof = orjson.loads(run.store.read(run.layout.manifest))
    assert {"sglang", "megatron-core", "prefect"} <= set(proof["versions"])
    assert any("mooncake" in package for package in proof["versions"])
    assert set(proof["cells"]) == {"a", "b"}
    for cell in proof["cells"].values():
        assert cell["rollout"]["pid"] != cell["training"]["pid"]
        assert cell["rollout"]["cpu_s"] > 0
        assert cell["training"]["cpu_s"] > 0
        assert {"training", "rollout"} <= {switch["to"] for switch in cell["switches"]}
    moved = sum(cell["mooncake"]["read_bytes"] for cell in proof["cells"].values())
    assert moved > 0
    names = {run["name"] for runs in proof["prefect"]["task_runs"].values() for run in runs}
    assert any(name.startswith("rollout") for name in names)


def test_evaluations_before_and_after(smoke_run: FinishedRun) -> None:
    evaluations = evaluations_of(smoke_run.run)
    last = updates_of(smoke_run.run)[-1].policy_version
    assert {0, last} <= set(evaluations)
    for evaluation in evaluations.values():
        assert 0 <= evaluation.pass_rate <= 1


def test_the_last_checkpoint_is_whole(smoke_run: FinishedRun) -> None:
    checkpoint = latest_checkpoint(smoke_run.run)
    assert checkpoint is not None
    assert checkpoint.manifest.version == updates_of(smoke_run.run)[-1].policy_version


def test_nothing_is_left_running(smoke_run: FinishedRun) -> None:
    assert smoke_run.left == ()
    run = smoke_run.run
    assert Store(run.store.url).children(run.layout.hosts) == []
