"""What a run tells its adaptive policy of itself, and the paces that this has chosen."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

from cells.board import Board
from cells.paces import PaceRow
from cells.scheduler import Adaptive, GroupSeen, Pace, Pacer, Pacing, Ran, Shape, SoFar
from flows.history import updates_of
from storage.journal import append_line, read_lines
from storage.layout import execution_id
from storage.objects import MissingObjectError
from storage.records import (
    ExecutionOutcome,
    ExecutionResult,
    QueryPlan,
    StepDone,
    decode,
    encode,
)
from storage.run import Run
from storage.samples import read_header
from tasks.rollout.group import find_result
from tasks.training.stream import read_updates


class RunPace:
    """The pace of one attempt at a step, going on from what earlier steps and attempts chose.

    Args:
        recent: queries of which groups may have ended since the last choice that is recorded.
    """

    def __init__(
        self, run: Run, step: int, policy: Adaptive, board: Board, recent: Iterable[QueryPlan]
    ) -> None:
        self._run = run
        self._step = step
        self._board = board
        training, rollout = run.config.training, run.config.rollout
        self._key = run.layout.paces
        rows = [decode(line, PaceRow, where=self._key) for line in read_lines(run.store, self._key)]
        self._groups = [group for row in rows for group in row.ended]
        self._recorded = len(self._groups)
        self._earlier = [update for update in updates_of(run) if update.step < step]
        self.refresh()
        self._worked_s = max([_worked_s(run, step), *(row.worked_s for row in rows)])
        self._began = time.monotonic()
        counts = accumulate(len(row.ended) for row in rows)
        self._pacer = Pacer(
            policy,
            shape_of(run),
            training.steps * rollout.queries,
            [row.choice(count) for row, count in zip(rows, counts, strict=True)],
        )
        self._last = rows[-1].at if rows else 0.0
        self._counted: set[str] = set()
        for query in recent:
            if not self._was_sealed(query):
                self.ended(query)

    @property
    def pacing(self) -> Pacing:
        """The pace that rules now."""
        return self._pacer.pacing

    def refresh(self) -> None:
        """Look which updates of the step are trained."""
        store, layout = self._run.store, self._run.layout
        updates = self._run.config.training.updates_per_step
        self._updates = [*self._earlier, *read_updates(store, layout, self._step, updates)]

    def ended(self, query: QueryPlan) -> None:
        """All executions of a query have ended. Told again, nothing changes."""
        if query.query_id in self._counted:
            return
        results = _results(self._run, query)
        end = max((result.ended_at for result in results), default=0.0)
        if len(results) < query.group_size or end <= self._last:
            return
        self._counted.add(query.query_id)
        if ran := _ran(results):
            self._groups.append(GroupSeen.of(ran))

    def _was_sealed(self, query: QueryPlan) -> bool:
        """Whether that was before the last choice, which then knew of it."""
        try:
            header = read_header(self._run.store, self._run.layout.group(query.query_id))
        except MissingObjectError:
            return False
        return header.sealed_at <= self._last

    def choose(self, launched: int, running: Sequence[QueryPlan]) -> None:
        """Ask for the pace, at the start of a step and after each update.

        Args:
            launched: groups of the run up to now.
            running: those of which executions run.
        """
        choice = self._pacer.choose(self._so_far(launched, running))
        if choice is not None:
            ended = tuple(self._groups[self._recorded :])
            row = PaceRow.of(choice, at=time.time(), step=self._step, ended=ended)
            append_line(self._run.store, self._key, encode(row))
            self._recorded = len(self._groups)

    def allowed(self, launched: int) -> int:
        """How many groups of the run may have been launched by now."""
        return self._pacer.allowed(self._so_far(launched))

    def coming(self, launched: int) -> int:
        """Groups that the update under way will let be launched."""
        return self._pacer.coming(self._so_far(launched))

    def _so_far(self, launched: int, running: Sequence[QueryPlan] = ()) -> SoFar:
        updates = self._updates
        now = self._worked_s + time.monotonic() - self._began
        burst = self.pacing.pace is Pace.BURST
        return SoFar(
            time=now,
            staleness=[update.staleness_mean for update in updates],
            busy_s=sum(update.busy_s or 0.0 for update in updates),
            groups=self._groups,
            launched=launched,
            running=[self._expected(query, now) for query in running] if burst else (),
            serving_s=self._board.served_s,
        )

    def _expected(self, query: QueryPlan, now: float) -> list[Ran]:
        """Executions of a group that runs, on the clock of worked seconds."""
        past = time.time() - now
        found = [
            Ran(ran.began - past, ran.ended - past, ran.timed_out, ran.waited_s)
            for ran in _ran(_results(self._run, query))
        ]
        limit_s = self._run.config.rollout.limit_s
        began = min((ran.began for ran in found), default=self._worked_s)
        left = query.group_size - len(found)
        return [*found, *[Ran.expected(began, now, limit_s)] * left]


def shape_of(run: Run) -> Shape:
    """What a run has fixed of its pace."""
    config = run.config
    capacity = config.cells.executions_per_cell
    if capacity is None:
        capacity = max(1, config.cells.kv_tokens // config.model.context)
    return Shape(
        cells=len(config.cells.cells),
        capacity=capacity,
        groups_per_update=config.rollout.queries // config.training.updates_per_step,
        updates_per_burst=config.training.updates_per_step,
    )


def _worked_s(run: Run, step: int) -> float:
    """Seconds of the steps before."""
    keys = [run.layout.step_done(earlier) for earlier in range(step)]
    return sum(run.store.read_record(key, StepDone).seconds for key in keys)


def _results(run: Run, query: QueryPlan) -> list[ExecutionResult]:
    """Of the executions of a query that have ended."""
    names = [execution_id(query.query_id, member) for member in range(query.group_size)]
    return [result for name in names if (result := find_result(run, name)) is not None]


def _ran(results: Iterable[ExecutionResult]) -> list[Ran]:
    """Those aside that failed on our side; times are seconds since the epoch."""
    return [
        Ran(
            result.started_at,
            result.ended_at,
            result.outcome is ExecutionOutcome.TIMED_OUT,
            result.waited_s,
        )
        for result in results
        if result.outcome is not ExecutionOutcome.HOST_FAILED
    ]
