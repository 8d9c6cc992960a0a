"""The Prefect task of the rollouts of some queries."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from cells.board import Board
from cells.client import DaemonClient
from storage.records import QueryPlan
from storage.run import open_run
from tasks.rollout.group import run_groups as run


@task(
    name="run_groups",
    task_run_name="rollout {label}",
    cache_policy=NO_CACHE,  # what is in storage says what is done, and nothing else does
)
def run_groups(
    root: str,
    run_id: str,
    queries: tuple[QueryPlan, ...],
    label: str,
    policy_version: int,
    temperature: float,
    host: DaemonClient,
    board: Board,
) -> bool:
    """Run the queries' executions to their end; the results lie in storage.

    Returns whether all have ended: where they may outlive the step, some go on.
    """
    opened = open_run(root, run_id)
    try:
        return run(
            opened,
            host,
            queries,
            policy_version,
            temperature,
            ended=board.execution_ended,
            stopped=lambda: board.stopped,
            released=(lambda: board.released) if board.newer else None,
        )
    except InterruptedError:
        board.check()  # the reason, where there is one
        raise
