"""Rollouts and verdicts of a set of queries, for a training step as for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from cells.board import Board
from flows.hosts import Hosts
from storage.layout import execution_id
from storage.records import QueryPlan
from storage.run import Run
from tasks.rollout.group import is_due
from tasks.rollout.task import run_group
from tasks.scoring.task import score_execution


def runner_for(queries: int, parallel_scores: int) -> TaskRunner[PrefectFuture[Any]]:
    """A task runner with threads enough that no waiting task blocks another.

    A group waits in a thread while it runs and in another while it is built.
    """
    threads = 2 * queries + parallel_scores + 8
    # Its future type is a subclass, which the invariant type parameter does not admit.
    return cast(TaskRunner[PrefectFuture[Any]], ThreadPoolTaskRunner(max_workers=threads))


def living(run: Run, queries: Sequence[QueryPlan]) -> int:
    """Executions of these queries that have still to be run."""
    return sum(
        is_due(run, execution_id(query.query_id, member), query.query_id)
        for query in queries
        for member in range(query.group_size)
    )


def roll_out(
    run: Run,
    root: str,
    hosts: Hosts,
    board: Board,
    queries: Sequence[QueryPlan],
    policy_version: int,
    temperature: float,
) -> Iterator[tuple[QueryPlan, list[PrefectFuture[str]]]]:
    """Each query with its submitted scores, in the order in which the groups' rollouts end.

    Raises:
        Exception: what a group's rollout failed with.
    """
    score = score_execution.with_options(
        retries=run.config.scoring.retries,
        retry_delay_seconds=[
            run.config.scoring.retry_delay_s * 2**attempt
            for attempt in range(run.config.scoring.retries)
        ],
    )
    groups = {
        run_group.submit(
            root, run.run_id, query, policy_version, temperature, hosts.executions, board
        ): query
        for query in queries
    }
    for done in as_completed(list(groups)):
        done.result()
        query = groups[done]
        members = (execution_id(query.query_id, member) for member in range(query.group_size))
        yield query, [score.submit(root, run.run_id, query, member, board) for member in members]
