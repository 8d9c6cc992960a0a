"""The Prefect task of a group's rollouts."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.context import TaskRunContext

from cells.board import Board
from cells.client import DaemonClient
from storage.records import QueryPlan
from storage.run import open_run
from tasks.rollout.group import run_group as run


def _key(context: TaskRunContext, arguments: dict[str, Any]) -> str:
    identity = open_run(arguments["root"], arguments["run_id"]).identity
    return f"{identity}-rollout-{arguments['query'].query_id}"


@task(
    name="run_group",
    task_run_name="rollout {query.query_id}",
    cache_key_fn=_key,
    persist_result=True,
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
    run(
        opened,
        host,
        query,
        policy_version,
        temperature,
        ended=board.execution_ended,
        stopped=lambda: board.stopped,
    )
    return query.query_id
