"""Rollouts and verdicts of a set of queries, for a training step as for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from cells.board import Board
from flows.hosts import Hosts
from storage.layout import execution_id
from storage.records import ExecutionOutcome, QueryPlan, Scored
from storage.run import Run
from tasks.rollout.group import find_result, is_due
from tasks.rollout.task import run_groups
from tasks.scoring.task import score_executions
from tasks.scoring.verdicts import newest_verdict

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


def living(run: Run, queries: Sequence[QueryPlan]) -> frozenset[str]:
    """Executions of these queries that have still to be run."""
    return frozenset(
        execution
        for query in queries
        for execution in _members(query)
        if is_due(run, execution, query.query_id)
    )


def roll_out(
    run: Run,
    root: str,
    hosts: Hosts,
    board: Board,
    batches: Sequence[Batch],
    policy_version: int,
    temperature: float,
) -> Iterator[tuple[Batch, PrefectFuture[None] | None]]:
    """Each batch with its submitted scoring, in the order in which the batches' rollouts end.

    What an earlier attempt has done gets no task: batches whose executions have all ended come
    first, and those that are scored too have None for their scoring.

    Raises:
        Exception: what a batch's rollout failed with.
    """
    score = scoring_task(run)

    def scored(batch: Batch) -> PrefectFuture[None] | None:
        return score(batch, root, board) if is_unscored(run, batch) else None

    ended: list[Batch] = []
    due: list[Batch] = []
    for batch in batches:
        (due if living(run, batch) else ended).append(batch)
    rollouts = {
        submit_rollout(run, root, hosts, board, batch, policy_version, temperature): batch
        for batch in due
    }
    for batch in ended:
        for query in batch:
            for execution in _members(query):
                board.execution_ended(execution)
        yield batch, scored(batch)
    for done in as_completed(list(rollouts)):
        done.result()
        batch = rollouts[done]
        yield batch, scored(batch)


def submit_rollout(
    run: Run,
    root: str,
    hosts: Hosts,
    board: Board,
    batch: Batch,
    policy_version: int,
    temperature: float,
) -> PrefectFuture[bool]:
    """The task that runs a batch to its end."""
    return run_groups.submit(
        root,
        run.run_id,
        batch,
        label(batch),
        policy_version,
        temperature,
        hosts.executions,
        board,
    )


def scoring_task(run: Run) -> Callable[[Batch, str, Board], PrefectFuture[None]]:
    """What submits the scoring of a batch, given the storage root and the step's board."""
    scoring = run.config.scoring
    score = score_executions.with_options(
        retries=scoring.retries,
        retry_delay_seconds=[
            scoring.retry_delay_s * 2**attempt for attempt in range(scoring.retries)
        ],
    )

    def submit(batch: Batch, root: str, board: Board) -> PrefectFuture[None]:
        return score.submit(root, run.run_id, batch, label(batch), board)

    return submit


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
    """Names a batch in the UI by its first and last execution."""
    first, last = _members(batch[0])[0], _members(batch[-1])[-1]
    if first == last:
        return first
    # Members of one query differ in their numbers alone.
    end = last.removeprefix(f"{batch[0].query_id}-") if len(batch) == 1 else last
    return f"{first} to {end}"


def is_unscored(run: Run, batch: Batch) -> bool:
    """Whether an execution of the batch has still to be scored, or again after a failure."""
    for query in batch:
        for execution in _members(query):
            known = newest_verdict(run.store, run.layout, execution)
            if known is not None and isinstance(known.verdict, Scored):
                continue
            result = find_result(run, execution)
            nothing_left = result and result.outcome is ExecutionOutcome.HOST_FAILED
            if known is None or not nothing_left:
                return True
    return False


def _members(query: QueryPlan) -> list[str]:
    return [execution_id(query.query_id, member) for member in range(query.group_size)]
