"""Tables of what a run did, for people."""

from __future__ import annotations

from statistics import fmean

from rich.table import Table

from flows.evaluate import standard_error
from flows.follow import evaluations_of, updates_of
from storage.records import UpdateMetrics
from storage.run import Run


def step_table(run: Run) -> Table:
    """One row a step. Times are seconds of the step, staleness is in updates."""
    table = Table(title=f"run {run.run_id}")
    for heading in (
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
    ):
        table.add_column(heading, justify="right")
    steps: dict[int, list[UpdateMetrics]] = {}
    for update in updates_of(run):
        steps.setdefault(update.step, []).append(update)
    for step, updates in sorted(steps.items()):
        rates = [update.pass_rate for update in updates if update.pass_rate is not None]
        table.add_row(
            str(step),
            str(updates[-1].policy_version),
            f"{fmean(rates):.3f}" if rates else "-",
            str(sum(update.valid for update in updates)),
            str(sum(update.excluded for update in updates)),
            str(sum(update.timed_out for update in updates)),
            f"{fmean(update.staleness_mean for update in updates):.2f}",
            f"{fmean(update.clip_fraction for update in updates):.0%}",
            f"{fmean(update.logprob_gap for update in updates):.1e}",
            str(sum(update.target_tokens for update in updates)),
            f"{sum(update.rollout_s for update in updates):.1f}",
            f"{sum(update.train_s for update in updates):.1f}",
            f"{sum(update.switch_s for update in updates):.1f}",
        )
    return table


def evaluation_table(run: Run) -> Table:
    """Held-out pass rates, the first and the last of them paired over problems."""
    table = Table(title="held-out problems")
    for heading in ("version", "pass rate", "standard error", "problems", "excluded"):
        table.add_column(heading, justify="right")
    evaluations = evaluations_of(run)
    for version, found in sorted(evaluations.items()):
        table.add_row(
            str(version),
            f"{found.pass_rate:.3f}",
            f"{found.standard_error:.3f}",
            str(found.problems),
            str(found.excluded),
        )
    if len(evaluations) > 1:
        first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
        shared = sorted(set(first.rates) & set(last.rates))
        if len(shared) > 1:
            gains = [last.rates[problem] - first.rates[problem] for problem in shared]
            table.add_row(
                "gain",
                f"{fmean(gains):+.3f}",
                f"{standard_error(gains):.3f}",
                str(len(gains)),
                "",
                style="bold",
            )
    return table
