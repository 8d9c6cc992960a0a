"""The Prefect task that scores an execution."""

from __future__ import annotations

import threading
from functools import lru_cache

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from cells.board import Board
from storage.records import QueryPlan
from storage.run import open_run
from tasks.scoring.score import score


@task(
    name="score_execution",
    task_run_name="score {execution}",
    cache_policy=NO_CACHE,  # a verdict that is in storage is found there
)
def score_execution(root: str, run_id: str, query: QueryPlan, execution: str, board: Board) -> str:
    """Evaluate an execution's frozen workspace; its verdict lies in storage. Returns its id.

    Raises:
        EvaluatorError: our side failed. When the retries are spent the task stays failed and the
            execution is left out of training; a later retry of the flow scores it again.
    """
    run = open_run(root, run_id)
    with _evaluators(run.config.scoring.parallel):
        if board.stopped:
            raise InterruptedError(f"{execution}: the step was stopped")
        attempt = task_run.run_count - 1
        score(run.store, run.layout, run.config, execution, query.problem_id, attempt=attempt)
    return execution


@lru_cache(maxsize=8)
def _evaluators(parallel: int) -> threading.Semaphore:
    """Evaluations share the cores with engines, however many threads wait to start one."""
    return threading.Semaphore(parallel)
