"""A real run whose groups outlive their step: executions go on under the next version and are
trained in the next step."""

from __future__ import annotations

import pytest

from cells.decisions import ALL_CELLS, Decision
from flows.carrying import trained_groups
from flows.fsck.check import check_run
from flows.history import updates_of
from storage.journal import read_journal
from storage.layout import execution_id
from storage.records import ExecutionResult, StepDone, StepPlan, decode
from storage.run import Run, open_run
from tasks.sampling.group import read_calls
from tasks.scoring.verdicts import newest_verdict
from tasks.warm_start.build import policy_key
from tests.flows.conftest import FinishedRun, finish, start_gyre
from tests.flows.orchestrated import logs, marked_processes

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1000)]

QUERIES, SIZE, UPDATES = 6, 3, 2
SETTINGS = (
    "cells.policy=adaptive",
    "cells.adaptive.always=true",
    # Some tools are slow, so that groups end one after another.
    "problems.specrepo.slow_share=0.5",
    "problems.specrepo.slow_median_s=4",
    f"rollout.queries={QUERIES}",
    f"rollout.group_size={SIZE}",
    "evaluation.before=false",
    "evaluation.problems=1",
)


@pytest.fixture(scope="module")
def adaptive_run(smoke_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`gyre train` of two steps, to its end, from the policy that the smoke run has made."""
    root = tmp_path_factory.mktemp("adaptive")
    policy = smoke_run.run.store.local_path(policy_key(smoke_run.run.config))
    chosen = (*SETTINGS, "model.source=hf_directory", f"model.path={policy}")
    settings = [part for setting in chosen for part in ("--set", setting)]
    command = start_gyre(root, "train", "--config", "smoke", "--name", "adaptive", *settings)
    output = finish(command, root)
    assert command.returncode == 0, f"{output[-6000:]}\n{logs(root)}"
    assert marked_processes(root) == []
    return open_run(str(root), "adaptive")


def members(queries: set[str]) -> list[str]:
    return [execution_id(query, member) for query in queries for member in range(SIZE)]


def result_of(run: Run, name: str) -> ExecutionResult:
    return run.store.read_record(run.layout.execution_result(name), ExecutionResult)


def test_an_execution_outlives_its_step_and_is_trained_in_the_next(adaptive_run: Run) -> None:
    run = adaptive_run
    carried = set(run.store.read_record(run.layout.step_done(0), StepDone).carried)
    end = run.store.written_at(run.layout.step_done(0)) or 0.0
    outlived = [
        name for name in members(carried)
        if result_of(run, name).started_at < end < result_of(run, name).ended_at
    ]  # fmt: skip
    assert outlived, f"carried over: {carried}"
    assert carried <= trained_groups(run, 1)
    assert run.store.read_record(run.layout.step_done(1), StepDone).carried == ()


def test_every_group_is_trained_once_and_every_execution_has_one_verdict(
    adaptive_run: Run,
) -> None:
    run = adaptive_run
    plans = [run.store.read_record(run.layout.step_plan(step), StepPlan) for step in range(2)]
    planned = {query.query_id for plan in plans for query in plan.queries}
    first, second = trained_groups(run, 0), trained_groups(run, 1)
    assert first | second == planned and not first & second
    assert len(first) == len(second) == QUERIES
    for name in members(planned):
        assert newest_verdict(run.store, run.layout, name) is not None
        assert len(run.store.children(run.layout.verdicts(name))) == 1
    updates = updates_of(run)
    assert [update.groups for update in updates] == [QUERIES // UPDATES] * 2 * UPDATES
    assert sum(update.executions for update in updates) == 2 * QUERIES * SIZE
    assert not check_run(run)


def test_newer_versions_are_in_spans_and_counted_by_token(adaptive_run: Run) -> None:
    run = adaptive_run
    plans = [run.store.read_record(run.layout.step_plan(step), StepPlan) for step in range(2)]
    mixed = 0
    for name in members({query.query_id for plan in plans for query in plan.queries}):
        calls = read_calls(run.store, run.layout, name)
        versions = {span.version for call in calls for span in call.spans}
        mixed += len(versions) > 1
        for call in calls:
            assert sum(span.end - span.start for span in call.spans) == len(call.output_ids)
    assert mixed, "an execution went on under a newer version"
    updates = updates_of(run)
    assert max(update.logprob_gap_max for update in updates if update.staleness_max == 0) < 1e-3
    assert all(update.staleness_max <= run.config.staleness.max for update in updates)
    assert [update.groups_stale for update in updates] == [0] * len(updates)


def test_the_choice_of_the_pace_is_among_the_decisions(adaptive_run: Run) -> None:
    rows = read_journal(adaptive_run.store, adaptive_run.layout.decisions)
    moves = [decode(row, Decision) for row in rows]
    assert not [move for move in moves if move.failed]
    chosen = [move for move in moves if move.cell == ALL_CELLS]
    assert {move.to for move in chosen} == {"carry"}
    assert "carry over within" in chosen[0].reason
