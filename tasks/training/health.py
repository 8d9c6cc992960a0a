"""Figures of an update that are out of bounds: a warning, or the end of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from configs.training import Ceiling, Floor, HealthConfig
from storage.records import UpdateMetrics


class UnhealthyError(RuntimeError):
    """An update that ``training.health`` stops the run for; the text says what is out of bounds."""


class Severity(StrEnum):
    """What an alarm does."""

    WARN = "warn"
    STOP = "stop"


@dataclass(frozen=True)
class Alarm:
    """A figure that is out of bounds."""

    severity: Severity
    text: str


def alarms(metrics: UpdateMetrics, health: HealthConfig) -> list[Alarm]:
    """All alarms of an update; those that stop first."""
    where = f"update {metrics.update} of step {metrics.step}"
    found = [
        Alarm(severity, f"{where}: {text}") for severity, text in _out_of_bounds(metrics, health)
    ]
    if metrics.skipped:
        skipped = (
            f"{where} was skipped: its gradient is not finite; the weights stay those of version "
            f"{metrics.policy_version}"
        )
        found.append(Alarm(Severity.WARN, skipped))
    return sorted(found, key=lambda alarm: alarm.severity is not Severity.STOP)


def refuse(found: list[Alarm]) -> None:
    """Stop the run if an alarm says so.

    Raises:
        UnhealthyError: one does.
    """
    reasons = [alarm.text for alarm in found if alarm.severity is Severity.STOP]
    if reasons:
        raise UnhealthyError(
            f"{'; '.join(reasons)}. The update is in the weights. Look at the run's report for the "
            f"cause. To go on all the same, resume the run; to go on from older weights, "
            f"gyre export them and start a run with model.path"
        )


def _out_of_bounds(metrics: UpdateMetrics, health: HealthConfig) -> Iterator[tuple[Severity, str]]:
    groups = metrics.groups
    figures: dict[str, float | None] = {
        "logprob_gap": metrics.logprob_gap,
        "logprob_gap_max": metrics.logprob_gap_max,
        "fresh_gap": metrics.fresh_gap,
        "clip_fraction": metrics.clip_fraction,
        "effective_samples": metrics.effective_samples,
        "entropy": metrics.entropy,
        "grad_norm": math.inf if metrics.skipped else metrics.grad_norm,
        "groups_without_gradient": metrics.groups_without_gradient / groups if groups else None,
    }
    for name, value in figures.items():
        bounds: Ceiling | Floor = getattr(health, name)
        above = isinstance(bounds, Ceiling)
        for severity, bound in ((Severity.STOP, bounds.stop), (Severity.WARN, bounds.warn)):
            if value is None or bound is None or not (value > bound if above else value < bound):
                continue
            side = "above" if above else "below"
            setting = f"training.health.{name}.{severity}"
            yield severity, f"{name} is {value:.3g}, {side} the {bound:g} of {setting}"
            break
