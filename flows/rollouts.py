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
from tasks.rollout.task import run_groups
from tasks.scoring.task import score_executions

Batch = tuple[QueryPlan, ...]
"""Queries that one task runs, and one task scores."""


def runner_for(batches: int) -> TaskRunner[PrefectFuture[Any]]:
    """A task runner with threads enough that no waiting task blocks another.

    A batch waits in a thread while it runs, in another while it is scored, and in a third while
    its samples are built.
    """
    threads = 3 * batches + 8
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
    batches: Sequence[Batch],
    policy_version: int,
    temperature: float,
) -> Iterator[tuple[Batch, PrefectFuture[None]]]:
    """Each batch with its submitted scoring, in the order in which the batches' rollouts end.

    Raises:
        Exception: what a batch's rollout failed with.
    """
    scoring = run.config.scoring
    score = score_executions.with_options(
        retries=scoring.retries,
        retry_delay_seconds=[
            scoring.retry_delay_s * 2**attempt for attempt in range(scoring.retries)
        ],
    )
    rollouts = {
        run_groups.submit(
            root,
            run.run_id,
            batch,
            label(batch),
            policy_version,
            temperature,
            hosts.executions,
            board,
        ): batch
        for batch in batches
    }
    for done in as_completed(list(rollouts)):
        done.result()
        batch = rollouts[done]
        yield batch, score.submit(root, run.run_id, batch, label(batch), board)


def in_batches(queries: Sequence[QueryPlan], executions: int) -> list[Batch]:
    """Queries in order, in batches of about so many executions.

    A task run costs the server tens of milliseconds, so small groups share one.
    """
    batches: list[list[QueryPlan]] = []
    held = executions
    for query in queries:
        if held >= executions:
            batches.append([])
            held = 0
        batches[-1].append(query)
        held += query.group_size
    return [tuple(batch) for batch in batches]


def label(batch: Batch) -> str:
    """Names a batch in the UI: its query, or its first and last one."""
    first, last = batch[0].query_id, batch[-1].query_id
    return first if first == last else f"{first} to {last}"
