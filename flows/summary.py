"""Tables of what a run did, for people."""

from __future__ import annotations

from statistics import fmean

from rich import box
from rich.table import Table

from flows.comparison import Comparison, Result
from flows.estimates import Estimate, share_interval
from storage.records import UpdateMetrics
from storage.run import Run

_STEP_COLUMNS = (
    "step",
    "version",
    "pass rate",
    "valid",
    "excluded",
    "timed out",
    "staleness",
    "clipped",
    "log-prob gap",
    "targets",
    "rollout s",
    "train s",
    "switch s",
)


def step_columns() -> tuple[str, ...]:
    """Headings of the table of steps."""
    return _STEP_COLUMNS


def step_table(run: Run, updates: list[UpdateMetrics]) -> Table:
    """One row a step. Times are seconds of the step, staleness is in updates."""
    table = Table(title=f"run {run.run_id}", box=box.SIMPLE_HEAD)
    for heading in _STEP_COLUMNS:
        table.add_column(heading, justify="right")
    for row in step_rows(updates):
        table.add_row(*row)
    return table


def step_rows(updates: list[UpdateMetrics]) -> list[tuple[str, ...]]:
    """The cells of the table of steps, as text."""
    steps: dict[int, list[UpdateMetrics]] = {}
    for update in updates:
        steps.setdefault(update.step, []).append(update)
    rows: list[tuple[str, ...]] = []
    for step, own in sorted(steps.items()):
        rates = [update.pass_rate for update in own if update.pass_rate is not None]
        rows.append(
            (
                str(step),
                str(own[-1].policy_version),
                f"{fmean(rates):.3f}" if rates else "-",
                str(sum(update.valid for update in own)),
                str(sum(update.excluded for update in own)),
                str(sum(update.timed_out for update in own)),
                f"{fmean(update.staleness_mean for update in own):.2f}",
                f"{fmean(update.clip_fraction for update in own):.0%}",
                f"{fmean(update.logprob_gap for update in own):.1e}",
                str(sum(update.target_tokens for update in own)),
                f"{sum(update.rollout_s for update in own):.1f}",
                f"{sum(update.train_s for update in own):.1f}",
                f"{sum(update.switch_s for update in own):.1f}",
            )
        )
    return rows


def comparison_table(comparison: Comparison) -> Table:
    """Held-out pass rates by version, the gains paired over problems, and the ceiling."""
    held_out = comparison.held_out
    table = Table(
        title=f"held-out problems: {held_out.problems}, {held_out.samples} executions each, "
        f"seed {held_out.seed}",
        box=box.SIMPLE_HEAD,
    )
    for number, heading in enumerate(comparison_columns(comparison)):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    plain = len(comparison.versions) + (comparison.ceiling is not None)
    for number, row in enumerate(comparison_rows(comparison)):
        table.add_row(*row, style="bold" if number >= plain else None)
    if comparison.reached is not None:
        table.caption = f"{comparison.reached:.0%} of the way from the first version to the ceiling"
    return table


def comparison_columns(comparison: Comparison) -> tuple[str, ...]:
    """Headings of the table of evaluations."""
    passes = (f"pass@{k}" for k in _ks(comparison))
    return (
        *("version", "pass rate", "std. error", "95 % interval"),
        *passes,
        *("problems", "timed out", "excluded"),
    )


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells of the table of evaluations, as text: versions, the ceiling, the gains."""
    ks = _ks(comparison)
    results = [*comparison.versions]
    if comparison.ceiling is not None:
        results.append(comparison.ceiling)
    rows = [_result_row(result, ks) for result in results]
    for gain in comparison.gains:
        rest = [""] * len(ks)
        figures = _figures(gain.pass_rate, signed=True)
        name = f"{gain.before} to {gain.after}"
        rows.append((name, *figures, *rest, str(gain.pass_rate.count), "", ""))
    return rows


def _ks(comparison: Comparison) -> list[int]:
    results = [*comparison.versions]
    if comparison.ceiling is not None:
        results.append(comparison.ceiling)
    return sorted({k for result in results for k in result.pass_at})


def _result_row(result: Result, ks: list[int]) -> tuple[str, ...]:
    passes = (f"{result.pass_at[k].mean:.3f}" if k in result.pass_at else "-" for k in ks)
    evaluation = result.evaluation
    return (
        result.name,
        *_figures(result.pass_rate),
        *passes,
        str(evaluation.problems),
        str(evaluation.timed_out),
        str(evaluation.excluded),
    )


def _figures(found: Estimate, signed: bool = False) -> tuple[str, str, str]:
    low, high = found.interval if signed else share_interval(found)
    sign = "+" if signed else ""
    mean = f"{found.mean:{sign}.3f}"
    return (mean, f"{found.standard_error:.3f}", f"{low:{sign}.3f} to {high:{sign}.3f}")
