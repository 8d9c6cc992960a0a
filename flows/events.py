"""What Gyre tells Prefect of a run as events, for its feed and for automations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from prefect.context import FlowRunContext
from prefect.events import emit_event

from cells.checkpoint import Checkpoint
from cells.decisions import Decision
from storage.records import Evaluation, Excluded, GroupHeader, StepDone, UpdateMetrics
from storage.run import Run

_MOST_EXCLUDED = 50
"""Events of one step; what is beyond is counted in the event of the step."""


class EventName(StrEnum):
    """Names of the events. The resource of each is the run."""

    STEP_FINISHED = "gyre.step.finished"
    CELL_SWITCHED = "gyre.cell.switched"
    EXECUTION_EXCLUDED = "gyre.execution.excluded"
    CHECKPOINT_PUBLISHED = "gyre.checkpoint.published"
    EVALUATED = "gyre.evaluation.finished"
    PASS_RATE_FELL = "gyre.pass-rate.fell"
    ALARM = "gyre.health.alarm"
    PROBLEMS_ADDED = "gyre.problems.added"


def step_finished(
    run: Run, done: StepDone, updates: Sequence[UpdateMetrics], headers: Sequence[GroupHeader]
) -> None:
    """A step is done, with what its updates have measured."""
    valid = sum(update.valid for update in updates)
    earned = sum((update.pass_rate or 0.0) * update.valid for update in updates)
    _emit(
        run,
        EventName.STEP_FINISHED,
        {
            "step": done.step,
            "steps": run.config.training.steps,
            "version": done.policy_version,
            "seconds": round(done.seconds, 3),
            "pass_rate": round(earned / valid, 4) if valid else None,
            "valid": valid,
            "excluded": sum(update.excluded for update in updates),
            "timed_out": sum(update.timed_out for update in updates),
            "logprob_gap": max((update.logprob_gap for update in updates), default=None),
            "target_tokens": sum(update.target_tokens for update in updates),
            "groups": len(headers),
            "groups_with_spread": sum(header.spread for header in headers),
        },
    )


def cells_switched(run: Run, decisions: Iterable[Decision]) -> None:
    """Moves of cells, each at the time when it was decided."""
    for one in decisions:
        _emit(
            run,
            EventName.CELL_SWITCHED,
            {
                "step": one.step,
                "cell": one.cell,
                "to": one.to,
                "reason": one.reason,
                "waterlevel": one.waterlevel,
                "seconds": round(one.seconds, 3),
                "failed": one.failed,
            },
            occurred=datetime.fromtimestamp(one.at, UTC),
        )


def executions_excluded(run: Run, headers: Iterable[GroupHeader]) -> None:
    """Executions of sealed groups that have no reward, and why."""
    found = [
        (header, member)
        for header in headers
        for member in header.members
        if isinstance(member.verdict, Excluded)
    ]
    for header, member in found[:_MOST_EXCLUDED]:
        assert isinstance(member.verdict, Excluded)
        _emit(
            run,
            EventName.EXECUTION_EXCLUDED,
            {
                "step": header.step,
                "execution": member.execution_id,
                "problem": header.problem_id,
                "reason": member.verdict.reason,
                "detail": member.verdict.detail[:500],
            },
        )


def checkpoint_published(run: Run, checkpoint: Checkpoint) -> None:
    """Weights of a version are whole in storage."""
    manifest = checkpoint.manifest
    _emit(
        run,
        EventName.CHECKPOINT_PUBLISHED,
        {
            "version": manifest.version,
            "step": manifest.step,
            "update": manifest.update,
            "key": checkpoint.key,
            "policy": checkpoint.policy_key,
        },
    )


def evaluated(run: Run, evaluation: Evaluation) -> None:
    """A version has a held-out pass rate."""
    _emit(
        run,
        EventName.EVALUATED,
        {
            "version": evaluation.version,
            "pass_rate": round(evaluation.pass_rate, 4),
            "standard_error": round(evaluation.standard_error, 4),
            "problems": evaluation.problems,
            "excluded": evaluation.excluded,
        },
    )


def pass_rate_fell(
    run: Run, best: Evaluation, now: Evaluation, interval: tuple[float, float]
) -> None:
    """The held-out pass rate is below an earlier version's by more than noise."""
    _emit(
        run,
        EventName.PASS_RATE_FELL,
        {
            "version": now.version,
            "pass_rate": round(now.pass_rate, 4),
            "best_version": best.version,
            "best_pass_rate": round(best.pass_rate, 4),
            "interval": [round(side, 4) for side in interval],
        },
    )


def alarm(run: Run, step: int, texts: Sequence[str]) -> None:
    """Figures of a step's updates are beyond their warning bounds in ``training.health``."""
    _emit(run, EventName.ALARM, {"step": step, "alarms": list(texts)})


def problems_added(root: str, name: str, config: str) -> None:
    """A new problem set lies in storage, with a configuration that trains on it."""
    emit_event(
        event=EventName.PROBLEMS_ADDED.value,
        resource={"prefect.resource.id": f"gyre.problems.{name}", "prefect.resource.name": name},
        payload={"name": name, "root": root, "config": config},
    )


def _emit(
    run: Run, name: EventName, payload: dict[str, Any], occurred: datetime | None = None
) -> None:
    """The flow run that an automation would act on is named first among what is related."""
    emit_event(
        event=name.value,
        resource={
            "prefect.resource.id": f"gyre.run.{run.run_id}",
            "prefect.resource.name": run.run_id,
        },
        occurred=occurred,
        related=_training(),
        payload={"run_id": run.run_id, "root": run.store.url, **payload},
    )


def _training() -> list[dict[str, str]]:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return []
    found = f"prefect.flow-run.{context.flow_run.id}"
    return [{"prefect.resource.id": found, "prefect.resource.role": "training"}]
