"""Bounds of an update's figures: which warn, which stop, and what is said."""

from __future__ import annotations

import pytest

from configs.training import HealthConfig
from storage.records import UpdateMetrics
from tasks.training.health import Severity, UnhealthyError, alarms, refuse


def metrics(**more):
    return UpdateMetrics(
        **{
            "step": 1,
            "update": 2,
            "policy_version": 7,
            "executions": 8,
            "valid": 8,
            "excluded": 0,
            "timed_out": 0,
            "reward_mean": 0.5,
            "pass_rate": 0.5,
            "staleness_mean": 0.0,
            "staleness_max": 0,
            "clip_fraction": 0.0,
            "grad_norm": 0.5,
            "logprob_gap": 0.0,
            "logprob_gap_max": 0.0,
            "target_tokens": 10,
            "trained_tokens": 20,
            "rollout_s": 1.0,
            "train_s": 1.0,
            "switch_s": 0.0,
            "ended_at": 1.0,
            "groups": 4,
            **more,
        }
    )


BAD = {
    "logprob_gap": ({"logprob_gap": 3.0}, 3.0),
    "logprob_gap_max": ({"logprob_gap_max": 3.0}, 3.0),
    "fresh_gap": ({"fresh_gap": 3.0}, 3.0),
    "clip_fraction": ({"clip_fraction": 1.0}, 1.0),
    "effective_samples": ({"effective_samples": 0.0625}, 0.0625),
    "entropy": ({"entropy": 0.0625}, 0.0625),
    "grad_norm": ({"grad_norm": 3.0}, 3.0),
    "groups_without_gradient": ({"groups_without_gradient": 3}, 0.75),
}


def bounds(name, severity, bound):
    quiet = {"warn": None, "stop": None}
    return HealthConfig(**dict.fromkeys(BAD, quiet) | {name: quiet | {severity: bound}})


@pytest.mark.parametrize("name", list(BAD))
@pytest.mark.parametrize("severity", ["warn", "stop"])
def test_every_figure_has_a_bound_that_is_named(name, severity):
    figures, value = BAD[name]
    floor = name in ("effective_samples", "entropy")
    inside, outside = (value / 2, value * 2) if floor else (value * 2, value / 2)
    line = metrics(**figures)
    assert alarms(line, bounds(name, severity, inside)) == []
    assert alarms(line, bounds(name, severity, value)) == [], "the bound itself is allowed"
    [alarm] = alarms(line, bounds(name, severity, outside))
    assert alarm.severity == severity
    side = "below" if floor else "above"
    assert alarm.text == (
        f"update 2 of step 1: {name} is {value:.3g}, {side} the {outside:g} of "
        f"training.health.{name}.{severity}"
    )
    if severity == "warn":
        refuse([alarm])
    else:
        with pytest.raises(UnhealthyError, match=rf"health\.{name}\.stop.*resume the run"):
            refuse([alarm])


def test_a_figure_beyond_both_bounds_stops_only():
    health = HealthConfig(logprob_gap={"warn": 0.1, "stop": 1.0})
    [alarm] = alarms(metrics(logprob_gap=2.0), health)
    assert alarm.severity is Severity.STOP


def test_figures_that_are_unknown_raise_no_alarm():
    tight = {"warn": 0.0, "stop": 0.0}
    health = HealthConfig(
        fresh_gap=tight, effective_samples={"warn": 1, "stop": 1}, grad_norm=tight
    )
    assert alarms(metrics(grad_norm=None, groups=0), health) == []


def test_a_skipped_update_is_always_told_and_stops_where_norms_are_bounded():
    line = metrics(grad_norm=None, skipped=True)
    [alarm] = alarms(line, HealthConfig())
    assert alarm.severity is Severity.WARN
    assert alarm.text == (
        "update 2 of step 1 was skipped: its gradient is not finite; the weights stay those of "
        "version 7"
    )
    first, second = alarms(line, HealthConfig(grad_norm={"stop": 100}))
    assert (first.severity, second.severity) == (Severity.STOP, Severity.WARN)
    assert "grad_norm is inf" in first.text


@pytest.mark.parametrize(
    ("name", "warn", "stop"), [("logprob_gap", 0.5, 0.1), ("entropy", 0.1, 0.5)]
)
def test_bounds_in_the_wrong_order_are_refused(name, warn, stop):
    with pytest.raises(ValueError, match=r"stop \(0\.\d\) is (below|above) warn"):
        HealthConfig(**{name: {"warn": warn, "stop": stop}})
