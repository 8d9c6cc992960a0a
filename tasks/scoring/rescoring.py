"""Evaluating preserved workspaces again: which, and what changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from storage.layout import execution_id
from storage.records import (
    Excluded,
    ExecutionOutcome,
    QueryPlan,
    Scored,
    StepPlan,
    VerdictRecord,
)
from storage.run import Run
from tasks.problems.source import EvaluatorError
from tasks.rollout.group import find_result
from tasks.scoring.score import exclude, score
from tasks.scoring.verdicts import newest_verdict


class VerdictState(StrEnum):
    """What an execution's newest verdict says."""

    SCORED = "scored"
    EXCLUDED = "excluded"
    """Our side failed, or there is no verdict at all."""
    TIMED_OUT = "timed_out"
    """Scored on what it had when its time was up."""


@dataclass(frozen=True)
class Preserved:
    """An execution that left a workspace, and the number of its newest verdict (-1 for none)."""

    query: QueryPlan
    execution: str
    version: int


def steps_of(run: Run) -> list[int]:
    """Steps that have a plan, in order."""
    names = run.store.children(f"{run.layout.prefix}/steps")
    return [int(name) for name in names if run.store.exists(run.layout.step_plan(int(name)))]


def preserved(
    run: Run, step: int | None = None, state: VerdictState | None = None, reason: str | None = None
) -> Iterator[Preserved]:
    """Executions of training steps whose workspace can be evaluated again: it is still there.

    Args:
        step: only of this one.
        state: only those whose newest verdict is of this kind.
        reason: only those that are excluded for this reason; ``no_verdict`` for those without one.
    """
    for number in steps_of(run) if step is None else [step]:
        plan = run.store.read_record(run.layout.step_plan(number), StepPlan)
        for query in plan.queries:
            for member in range(query.group_size):
                name = execution_id(query.query_id, member)
                result = find_result(run, name)
                if result is None or result.outcome is ExecutionOutcome.HOST_FAILED:
                    continue
                if not result.workspace_key or not run.store.exists(result.workspace_key):
                    continue
                record = newest_verdict(run.store, run.layout, name)
                if _matches(record, state, reason):
                    yield Preserved(query, name, -1 if record is None else record.version)


def rescore(run: Run, one: Preserved, attempt: int, *, last: bool) -> None:
    """Add a verdict to an execution, unless an earlier attempt has added a score since it was
    chosen. Sealed groups stay as they are: there the verdict is marked late.

    Args:
        last: an evaluator that fails again is recorded.

    Raises:
        EvaluatorError: our side failed.
    """
    newest = newest_verdict(run.store, run.layout, one.execution)
    if newest is not None and newest.version > one.version and isinstance(newest.verdict, Scored):
        return
    try:
        score(
            run.store,
            run.layout,
            run.config,
            one.execution,
            one.query.problem_id,
            attempt=attempt,
            again=True,
        )
    except EvaluatorError as error:
        if last and (newest is None or isinstance(newest.verdict, Excluded)):
            # A reward that stands is not replaced by our own failure.
            query = one.query.query_id
            exclude(run.store, run.layout, one.execution, query, error.reason, str(error))
        raise


def reward_of(record: VerdictRecord | None) -> float | None:
    """The reward of a verdict that has one."""
    if record is None or not isinstance(record.verdict, Scored):
        return None
    return record.verdict.reward


def _matches(record: VerdictRecord | None, state: VerdictState | None, reason: str | None) -> bool:
    verdict = None if record is None else record.verdict
    if reason is not None:
        found = verdict.reason if isinstance(verdict, Excluded) else None
        if (reason != "no_verdict" or verdict is not None) and found != reason:
            return False
    if state is VerdictState.EXCLUDED:
        return not isinstance(verdict, Scored)
    if state is VerdictState.SCORED:
        return isinstance(verdict, Scored)
    if state is VerdictState.TIMED_OUT:
        return isinstance(verdict, Scored) and verdict.timed_out
    return True
