"""The Prefect task that scores the executions of some queries."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from cells.board import Board
from storage.layout import execution_id
from storage.objects import StorageError
from storage.records import QueryPlan, RecordError
from storage.run import Run, open_run
from tasks.problems.source import EvaluatorError
from tasks.scoring.score import exclude, score

_SHOWN = 4
"""Failures whose texts go into the task's error; the others are counted."""


@task(
    name="score_executions",
    task_run_name="score {label}",
    cache_policy=NO_CACHE,  # a verdict that is in storage is found there
)
def score_executions(
    root: str, run_id: str, queries: tuple[QueryPlan, ...], label: str, board: Board
) -> None:
    """Evaluate the frozen workspaces of these queries' executions; the verdicts lie in storage.

    One task for a whole group, because a task run costs the server as much as an evaluation does.
    A retry evaluates only what has no score yet.

    Raises:
        EvaluatorError: our side failed for some; the others have their verdicts. When the retries
            are spent the task stays failed and those are recorded as excluded, with the reason; a
            later retry of the flow scores them again.
    """
    run = open_run(root, run_id)
    attempt = task_run.run_count - 1
    members = [
        (query, execution_id(query.query_id, member))
        for query in queries
        for member in range(query.group_size)
    ]

    def evaluate(member: tuple[QueryPlan, str]) -> str | None:
        return _failure(run, *member, attempt, board)

    with ThreadPoolExecutor(run.config.scoring.parallel) as pool:
        failures = [text for text in pool.map(evaluate, members) if text]
    if board.stopped:
        board.check()  # the reason, where there is one
        raise InterruptedError(f"score {label}: the step was stopped")
    if failures:
        more = f"\nand {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
        raise EvaluatorError(
            f"{len(failures)} of {len(members)} evaluations failed:\n"
            + "\n".join(failures[:_SHOWN])
            + more
        )


def _failure(run: Run, query: QueryPlan, execution: str, attempt: int, board: Board) -> str | None:
    """What an evaluation failed with; None when there is a verdict, or no more need of one."""
    with evaluators(run.config.scoring.parallel):
        if board.stopped:
            return None
        evaluator = f"evaluator of {execution}"
        board.progress.waits(evaluator, "its end")
        try:
            score(run.store, run.layout, run.config, execution, query.problem_id, attempt=attempt)
        except EvaluatorError as error:
            if attempt >= run.config.scoring.retries:
                give_up(run, execution, query.query_id, error)
            return str(error)
        finally:
            board.progress.waits(evaluator, "")
            board.progress.did("scoring", f"{execution} was evaluated")
    return None


def give_up(run: Run, execution: str, query: str, error: EvaluatorError) -> None:
    """Record that an execution has no reward. Where even that fails, it has no verdict, which
    leaves it out as well."""
    with suppress(StorageError, RecordError):
        exclude(run.store, run.layout, execution, query, error.reason, str(error))


@lru_cache(maxsize=8)
def evaluators(parallel: int) -> threading.Semaphore:
    """Evaluations share the cores with engines, however many groups are scored at once."""
    return threading.Semaphore(parallel)
