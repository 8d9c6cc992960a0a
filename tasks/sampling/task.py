"""The Prefect task that seals a group."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from cells.board import Board
from storage.layout import execution_id
from storage.records import ExecutionResult, QueryPlan, Scored, VerdictRecord
from storage.run import open_run
from tasks.rollout.group import find_result
from tasks.sampling.group import build_group
from tasks.sampling.guard import ExclusionGuard
from tasks.scoring.verdicts import newest_verdict
from tasks.training.feed import GroupFeed


@task(name="build_samples", task_run_name="samples {query.query_id}", cache_policy=NO_CACHE)
def build_samples(
    root: str,
    run_id: str,
    step: int,
    query: QueryPlan,
    feed: GroupFeed,
    guard: ExclusionGuard,
    board: Board,
    settled: Any,
) -> str:
    """Seal a query's group from the results and verdicts in storage, and tell the training.

    Args:
        settled: the future of the scores; only waited for. What they left is read from storage,
            and an execution whose evaluation failed for good has no verdict there: it is excluded.

    Raises:
        TooManyExcludedError: too much of the update failed on our side. The group stays unsealed,
            so that a retry after the repair scores it again.
        InterruptedError: the step was stopped, perhaps before all scores were there.
    """
    run = open_run(root, run_id)
    if board.stopped:
        board.check()  # the reason, where there is one
        raise InterruptedError(f"samples {query.query_id}: the step was stopped")
    names = [execution_id(query.query_id, member) for member in range(query.group_size)]
    results: dict[str, ExecutionResult] = {}
    verdicts: dict[str, VerdictRecord] = {}
    for name in names:
        if result := find_result(run, name):
            results[name] = result
        if verdict := newest_verdict(run.store, run.layout, name):
            verdicts[name] = verdict
    lost = query.group_size - sum(isinstance(v.verdict, Scored) for v in verdicts.values())
    with guard.turn():
        guard.admit(query.query_id, lost)
        group = build_group(run.store, run.layout, run.config, query, step, results, verdicts)
        feed.put(query.query_id)
    get_run_logger().debug("sealed %s: %d samples", query.query_id, len(group.samples))
    return run.layout.group(query.query_id)
