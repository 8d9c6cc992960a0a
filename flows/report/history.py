"""All that the page says about a run, read once from its storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cells.decisions import Decision
from cells.levels import Level
from flows.comparison import Comparison, compare
from flows.history import updates_of
from flows.report.roles import Span, role_spans
from storage.journal import read_journal
from storage.layout import execution_id
from storage.objects import MissingObjectError
from storage.records import (
    Excluded,
    ExecutionOutcome,
    ExecutionResult,
    Record,
    StepDone,
    StepPlan,
    UpdateMetrics,
    VerdictRecord,
    decode,
)
from storage.run import Run
from storage.samples import read_header

R = TypeVar("R", bound=Record)

MOST_GROUPS = 2000
"""Of more, an even choice is read: the page has to be there soon after the run."""

TIMED_OUT, LATE = "timed out, trained", "verdict came late, not trained"


@dataclass(frozen=True)
class Ended:
    """An execution of a training step. Times are seconds since the epoch."""

    step: int
    started_at: float
    ended_at: float
    waited_s: float
    timed_out: bool

    @property
    def worked_s(self) -> float:
        """Seconds without the waiting in the gateway."""
        return max(self.ended_at - self.started_at - self.waited_s, 0.0)


@dataclass(frozen=True)
class History:
    """A run, finished or not."""

    run_id: str
    began: float
    """Of whatever was recorded first and last, in seconds since the epoch."""
    ended: float
    steps: int
    """That the settings ask for."""
    updates: tuple[UpdateMetrics, ...]
    done: tuple[StepDone, ...]
    levels: tuple[Level, ...]
    spans: tuple[Span, ...]
    decisions: tuple[Decision, ...]
    executions: tuple[Ended, ...]
    verdicts: dict[int, Counter[str]]
    """Executions of a step whose verdict is not plain: by the reason."""
    read_groups: int
    all_groups: int
    comparison: Comparison


def read_history(run: Run) -> History:
    """Read what is there. What another process is just writing is left out.

    Raises:
        StorageError: storage can't be read.
        RecordError: something is of another version of Gyre.
    """
    levels = _journal(run, run.layout.levels, Level)
    decisions = _journal(run, run.layout.decisions, Decision)
    updates = tuple(updates_of(run))
    groups = [
        (plan.step, query.query_id, query.group_size)
        for plan in _plans(run)
        for query in plan.queries
    ]
    stride = -(-len(groups) // MOST_GROUPS) or 1
    chosen = groups[::stride]
    executions: list[Ended] = []
    verdicts: dict[int, Counter[str]] = {}
    for step, query, size in chosen:
        names = [execution_id(query, member) for member in range(size)]
        executions += [one for name in names if (one := _ended(run, step, name)) is not None]
        verdicts.setdefault(step, Counter()).update(_unplain(run, query, names))
    times = [
        *(level.at for level in levels),
        *(decision.at for decision in decisions),
        *(update.ended_at for update in updates),
        *(one.started_at for one in executions),
        *(one.ended_at for one in executions),
    ]
    began, ended = min(times, default=0.0), max(times, default=0.0)
    return History(
        run_id=run.run_id,
        began=began,
        ended=ended,
        steps=run.config.training.steps,
        updates=updates,
        done=tuple(_done(run)),
        levels=levels,
        spans=role_spans(levels, decisions, began, ended),
        decisions=decisions,
        executions=tuple(executions),
        verdicts=verdicts,
        read_groups=len(chosen),
        all_groups=len(groups),
        comparison=compare(run),
    )


def _journal(run: Run, prefix: str, kind: type[R]) -> tuple[R, ...]:
    return tuple(decode(line, kind, where=prefix) for line in read_journal(run.store, prefix))


def _plans(run: Run) -> Iterator[StepPlan]:
    for step in range(run.config.training.steps):
        key = run.layout.step_plan(step)
        if not run.store.exists(key):
            return
        yield run.store.read_record(key, StepPlan)


def _done(run: Run) -> Iterator[StepDone]:
    for step in range(run.config.training.steps):
        key = run.layout.step_done(step)
        if run.store.exists(key):
            yield run.store.read_record(key, StepDone)


def _ended(run: Run, step: int, name: str) -> Ended | None:
    try:
        result = run.store.read_record(run.layout.execution_result(name), ExecutionResult)
    except MissingObjectError:
        return None
    if result.outcome is ExecutionOutcome.HOST_FAILED:
        return None
    timed_out = result.outcome is ExecutionOutcome.TIMED_OUT
    return Ended(step, result.started_at, result.ended_at, result.waited_s, timed_out)


def _unplain(run: Run, query: str, names: Sequence[str]) -> Iterator[str]:
    """A word for each execution of a sealed group that is more than a reward in time."""
    try:
        header = read_header(run.store, run.layout.group(query))
    except MissingObjectError:
        return
    for member in header.members:
        if isinstance(member.verdict, Excluded):
            yield f"excluded: {member.verdict.reason.replace('_', ' ')}"
        elif member.verdict.timed_out:
            yield TIMED_OUT
    for name in names:
        yield from (LATE for record in _verdicts(run, name) if record.late)


def _verdicts(run: Run, name: str) -> Iterator[VerdictRecord]:
    folder = run.layout.verdicts(name)
    for version in run.store.children(folder):
        yield run.store.read_record(f"{folder}/{version}", VerdictRecord)
