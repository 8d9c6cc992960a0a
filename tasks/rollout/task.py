"""The Prefect task of a group's rollouts."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from cells.board import Board
from cells.client import DaemonClient
from storage.records import QueryPlan
from storage.run import open_run
from tasks.rollout.group import run_group as run


@task(
    name="run_group",
    task_run_name="rollout {query.query_id}",
    cache_policy=NO_CACHE,  # what is in storage says what is done, and nothing else does
)
def run_group(
    root: str,
    run_id: str,
    query: QueryPlan,
    policy_version: int,
    temperature: float,
    host: DaemonClient,
    board: Board,
) -> str:
    """Run a query's executions to their end; the results lie in storage. Returns the query's id."""
    opened = open_run(root, run_id)
    try:
        run(
            opened,
            host,
            query,
            policy_version,
            temperature,
            ended=board.execution_ended,
            stopped=lambda: board.stopped,
        )
    except InterruptedError:
        board.check()  # the reason, where there is one
        raise
    return query.query_id
