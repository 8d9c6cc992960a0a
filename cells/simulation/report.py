"""Results as plain values for JSON, and as rows of text for tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cells.simulation.compare import Comparison, Spread
from cells.simulation.plan import Option
from cells.simulation.published import Figure, Kind, Row
from cells.simulation.recorded import RecordedTimes
from cells.simulation.workload import Origin

COMPARISON_COLUMNS = (
    "policy",
    "hours",
    "spread",
    "over elastic",
    "staleness",
    "share of bound",
    "switches",
)
PUBLISHED_COLUMNS = (
    "workload",
    "figure",
    "published",
    "simulated",
    "spread",
    "off",
    "fitted",
    "chosen",
)
PLAN_COLUMNS = (
    "cells",
    "GPUs each",
    "capacity",
    "hours/update",
    "over Colocate",
    "over Async",
    "gain",
)

_WORDS = {
    Kind.HOURS: "hours of {}",
    Kind.GAIN: "gain over {}",
    Kind.SAVED: "saved by streaming in {}",
    Kind.BEYOND_4H: "queries of 4 h or more, {}",
    Kind.TIMED_OUT_BEYOND_4H: "of them timed out, {}",
}


def published_value(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The object that `gyre simulate published --json` prints."""
    return {
        "rows": [row_value(row) for row in rows],
        "workloads": [comparison_value(comparison) for comparison in comparisons],
    }


def comparison_value(
    comparison: Comparison, recorded: RecordedTimes | None = None
) -> dict[str, Any]:
    """One workload under every policy; hours, updates and shares, and what a run recorded."""
    workload = comparison.workload
    fitted = workload.of_origin(Origin.FITTED)
    chosen = workload.of_origin(Origin.CHOSEN)
    return {
        "workload": workload.name,
        "recorded": asdict(recorded) if recorded else None,
        "seeds": list(comparison.seeds),
        "cells": workload.cells.count,
        "updates": workload.batch.updates,
        "fitted_parameters": list(fitted),
        "fitted_count": len(fitted),
        "chosen_parameters": list(chosen),
        "chosen_count": len(chosen),
        "colocate_limit": comparison.colocate_limit,
        "saved_by_streaming": spread_value(comparison.saved_by_streaming),
        "bounds_hours": [
            {
                "work": bound.work_s / 3600,
                "critical_path": bound.critical_s / 3600,
                "bursts": bound.burst_s / 3600,
            }
            for bound in comparison.bounds
        ],
        "policies": {name: _policy_value(comparison, name) for name in comparison.outcomes},
    }


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each policy, under `COMPARISON_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for name, outcomes in comparison.outcomes.items():
        hours = comparison.hours(name)
        over = "elastic" in comparison.outcomes
        rows.append(
            (
                name,
                _hours(hours.median),
                f"{_hours(hours.low)} to {_hours(hours.high)}",
                f"{comparison.ratio(name, 'elastic').median:.3f}" if over else "",
                f"{comparison.staleness(name).median:.2f}",
                f"{comparison.share_of_bound(name).median:.1%}",
                f"{max(outcome.switches for outcome in outcomes)}",
            )
        )
    return rows


def published_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A row for each published figure, under `PUBLISHED_COLUMNS`."""
    return [
        (
            row.name,
            figure_name(row.figure),
            number_range(row.figure.low, row.figure.high),
            f"{row.simulated.median:.3f}",
            f"{row.simulated.low:.3f} to {row.simulated.high:.3f}",
            f"{row.off:+.1%}",
            "yes" if row.figure.fitted else "no",
            f"{len(row.chosen)}",
        )
        for row in rows
    ]


def figure_name(figure: Figure) -> str:
    """A figure in words."""
    return _WORDS[figure.kind].format(figure.baseline)


def plan_value(options: Sequence[Option]) -> dict[str, Any]:
    """The object that `gyre plan --json` prints; the first option is the fastest."""
    return {
        "options": [
            {
                "cells": option.cells,
                "gpus_per_cell": option.gpus_per_cell,
                "capacity": option.capacity,
                "hours_per_update": option.hours_per_update,
                "over_colocate": spread_value(option.over_colocate),
                "over_async": spread_value(option.over_async),
                "async_training_cells": option.async_training_cells,
                "gain": option.gain,
            }
            for option in options
        ]
    }


def plan_rows(options: Sequence[Option]) -> list[tuple[str, ...]]:
    """A row for each option, under `PLAN_COLUMNS`."""
    return [
        (
            f"{option.cells}",
            f"{option.gpus_per_cell}",
            f"{option.capacity}",
            f"{option.hours_per_update:.3f}",
            f"{option.over_colocate.median:.3f}" if option.over_colocate else "",
            f"{option.over_async.median:.3f} ({option.async_training_cells} train)"
            if option.over_async
            else "",
            f"{option.gain:.3f}",
        )
        for option in options
    ]


def spread_value(spread: Spread | None) -> dict[str, float] | None:
    """A spread as an object, or null."""
    if spread is None:
        return None
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def row_value(row: Row) -> dict[str, Any]:
    """A published figure beside the simulated one, as an object."""
    figure = row.figure
    return {
        "workload": row.name,
        "figure": figure.kind.value,
        "baseline": figure.baseline,
        "published_low": figure.low,
        "published_high": figure.high,
        "simulated": row.simulated.median,
        "simulated_low": row.simulated.low,
        "simulated_high": row.simulated.high,
        "fitted": figure.fitted,
        "chosen_assumptions": len(row.chosen),
        "chosen": list(row.chosen),
        "off": row.off,
        "within_10_percent": row.within,
        "limit": row.limit,
    }


def _policy_value(comparison: Comparison, name: str) -> dict[str, Any]:
    outcomes = comparison.outcomes[name]
    return {
        "hours": spread_value(comparison.hours(name)),
        "mean_staleness": spread_value(comparison.staleness(name)),
        "share_of_bound": spread_value(comparison.share_of_bound(name)),
        "training_wait": spread_value(comparison.training_wait(name)),
        "trained_tokens": [outcome.tokens for outcome in outcomes],
        "switches": [outcome.switches for outcome in outcomes],
        "switching_cell_hours": [outcome.switching_s / 3600 for outcome in outcomes],
        "training_cell_hours": [outcome.training_busy_s / 3600 for outcome in outcomes],
        "rerouted_executions": [sum(e.reroutes > 0 for e in o.executions) for o in outcomes],
        "events": [outcome.events for outcome in outcomes],
        "paces": [[[c.time, c.pace.value, c.reason] for c in o.choices] for o in outcomes],
    }


def number_range(low: float, high: float) -> str:
    """One number, or the two ends."""
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _hours(value: float) -> str:
    """Hours with two decimals; a run of minutes needs more."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
