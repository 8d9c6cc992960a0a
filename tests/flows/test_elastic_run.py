"""A real run in which the core trains in mid-step, while the other cell serves the rest."""

from __future__ import annotations

import orjson
import pytest

from cells.decisions import Decision
from flows.history import updates_of
from storage.journal import read_journal
from storage.layout import execution_id
from storage.records import ExecutionOutcome, ExecutionResult, StepPlan, decode
from storage.run import Run, open_run
from tasks.sampling.group import read_calls
from tasks.warm_start.build import policy_key
from tests.flows.conftest import FinishedRun, finish, start_gyre
from tests.flows.orchestrated import logs, marked_processes
from tests.moved import moved_prefixes

pytestmark = [pytest.mark.real, pytest.mark.timeout(1000)]

SETTINGS = (
    "cells.policy=elastic",
    "cells.kv_pool=true",
    # Some tools are slow, so that groups end one after another.
    "problems.specrepo.slow_share=0.5",
    "problems.specrepo.slow_median_s=4",
    "training.steps=1",
    "rollout.queries=6",
    "evaluation.before=false",
    "evaluation.problems=1",
)


@pytest.fixture(scope="module")
def elastic_run(smoke_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`gyre train` of one elastic step, to its end, from the policy that the smoke run has made."""
    root = tmp_path_factory.mktemp("elastic")
    policy = smoke_run.run.store.local_path(policy_key(smoke_run.run.config))
    chosen = (*SETTINGS, "model.source=hf_directory", f"model.path={policy}")
    settings = [part for setting in chosen for part in ("--set", setting)]
    command = start_gyre(root, "train", "--config", "smoke", "--name", "elastic", *settings)
    output = finish(command, root)
    assert command.returncode == 0, f"{output[-6000:]}\n{logs(root)}"
    assert marked_processes(root) == []
    return open_run(str(root), "elastic")


def test_the_core_left_in_mid_step_and_all_came_back(elastic_run: Run) -> None:
    rows = read_journal(elastic_run.store, elastic_run.layout.decisions)
    moves = [decode(row, Decision) for row in rows]
    assert not [move for move in moves if move.failed]
    first = next(move for move in moves if move.to == "training")
    assert (first.cell, first.waterlevel > 0) == ("a", True), first.reason
    assert {"reroute", "drain", "backup", "replica"} <= set(first.parts)
    back = [move.cell for move in moves if move.to == "rollout" and move.step == 0]
    assert set(back) == {"a", "b"}, "both serve the new version before the step is over"


def test_no_execution_noticed_and_all_was_trained(elastic_run: Run) -> None:
    run = elastic_run
    plan = run.store.read_record(run.layout.step_plan(0), StepPlan)
    names = [
        execution_id(query.query_id, member)
        for query in plan.queries
        for member in range(query.group_size)
    ]
    for name in names:
        result = run.store.read_record(run.layout.execution_result(name), ExecutionResult)
        assert result.outcome in (ExecutionOutcome.COMPLETED, ExecutionOutcome.TIMED_OUT)
    updates = updates_of(run)
    assert [update.update for update in updates] == [0, 1]
    assert sum(update.executions for update in updates) == len(names)
    assert updates[0].logprob_gap_max < 1e-3, "tokens of interrupted generations too"
    assert [update.groups_stale for update in updates] == [0, 0]


def test_the_core_moved_weights_to_the_other_cell(elastic_run: Run) -> None:
    proof = orjson.loads(elastic_run.store.read(elastic_run.layout.manifest))
    assert proof["cells"]["b"]["mooncake"]["read_bytes"] > 0


def test_prefixes_followed_the_executions_that_moved(elastic_run: Run) -> None:
    tokens = cached = 0
    for name in elastic_run.store.children(f"{elastic_run.layout.prefix}/executions"):
        found = moved_prefixes(read_calls(elastic_run.store, elastic_run.layout, name))
        tokens, cached = tokens + found[0], cached + found[1]
    print(f"\nfound after a move: {cached} of {tokens} tokens")
    # Without the pool a page of the common system prompt is all.
    # Few prefixes: on a busy machine one of them comes too late. test_real_switches moves hundreds.
    assert cached > 0.5 * tokens > 0
