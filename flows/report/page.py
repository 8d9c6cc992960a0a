"""What the page about a run says, in the order in which it says it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape
from statistics import fmean

from flows.live import duration
from flows.report import figures
from flows.report.history import History
from flows.report.html import document, figure, section, table, tiles
from flows.report.timeline import roles_and_waterlevel
from flows.summary import (
    comparison_columns,
    comparison_rows,
    step_columns,
    step_rows,
)


def render(history: History, settings: str) -> str:
    """The page as text.

    Args:
        settings: of the run, as YAML.
    """
    return document(
        title=f"Gyre run {history.run_id}",
        heading=history.run_id,
        about=_about(history),
        body="\n".join((tiles(list(_facts(history))), *_sections(history), _settings(settings))),
    )


def _about(history: History) -> str:
    done = f"{len(history.done)} of {history.steps} steps"
    if not history.ended:
        return f"{done}; nothing was recorded yet"
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(history.began))
    return f"{done}, began {began}, {duration(history.ended - history.began)} until the last record"


def _facts(history: History) -> Iterator[tuple[str, str]]:
    comparison = history.comparison
    if comparison.versions:
        first, last = comparison.versions[0], comparison.versions[-1]
        yield f"held out, version {first.name}", f"{first.pass_rate.mean:.3f}"
        if last is not first:
            yield f"held out, version {last.name}", f"{last.pass_rate.mean:.3f}"
    if comparison.gain is not None:
        low, high = comparison.gain.pass_rate.interval
        yield (
            f"paired gain, 95 % {low:+.3f} to {high:+.3f}",
            f"{comparison.gain.pass_rate.mean:+.3f}",
        )
    if comparison.reached is not None:
        yield "of the way to the ceiling", f"{comparison.reached:.0%}"
    updates = history.updates
    yield "updates", f"{len(updates)}"
    yield "target tokens trained", _short(sum(update.target_tokens for update in updates))
    seconds = sum(update.switch_s for update in updates)
    whole = sum(done.seconds for done in history.done)
    if whole:
        yield "of the steps' time went to switches", f"{seconds / whole:.1%}"


def _sections(history: History) -> Iterator[str]:
    yield section(
        "Pass rate",
        "Mean reward by weight version. Batches are of other problems each time; the held-out "
        "problems are the same for every version.",
        figure(figures.pass_rates(history)) + _held_out(history),
    )
    yield section(
        "Cells and waterlevel",
        "What each cell did, and how many executions lived meanwhile.",
        figure(roles_and_waterlevel(history))
        if history.spans or history.executions
        else _nothing("No cell has served or trained yet."),
    )
    yield section(
        "Executions",
        f"Training executions, how long they took. {_read(history)}",
        figure(figures.durations(history))
        if history.executions
        else _nothing("No execution has ended yet."),
    )
    if history.updates:
        yield section(
            "Updates",
            "Staleness is how many updates older than the trained weights the sampling weights "
            "were. The gap is between the trainer's log-probability of a token and the recorded "
            "one; it is the engines' difference where staleness is 0.",
            figure(figures.health(history)),
        )
        yield section(
            "Time of a step",
            "Seconds in which executions lived, updates were computed, and at least one cell was "
            "switching. They overlap where cells do different things.",
            figure(figures.seconds_of_steps(history)) + _switches(history),
        )
    unplain = figures.verdicts(history)
    yield section(
        "Verdicts out of the ordinary",
        "Excluded executions have no reward and are not trained. Executions that ran out of time "
        "are scored as they were.",
        figure(unplain)
        if unplain
        else _nothing("None: no execution was excluded, came late or timed out."),
    )
    if history.updates:
        rows = step_rows(list(history.updates))
        yield section("Steps", "", table(step_columns(), rows))


def _held_out(history: History) -> str:
    if not history.comparison.versions:
        return ""
    return table(comparison_columns(history.comparison), comparison_rows(history.comparison))


def _switches(history: History) -> str:
    rows = []
    for to in ("training", "rollout"):
        moves = [decision for decision in history.decisions if decision.to == to]
        seconds = [decision.seconds for decision in moves if not decision.failed]
        if moves:
            mean = f"{fmean(seconds):.2f}" if seconds else "-"
            failed = str(len(moves) - len(seconds))
            rows.append((to, str(len(moves)), mean, f"{sum(seconds):.1f}", failed))
    columns = ("switches to", "count", "mean seconds", "cell seconds", "failed")
    return table(columns, rows) if rows else ""


def _read(history: History) -> str:
    if history.read_groups == history.all_groups:
        return ""
    return f"Of {history.all_groups} groups, {history.read_groups} evenly chosen ones were read."


def _settings(settings: str) -> str:
    return (
        "<section><details><summary>Settings of the run</summary>"
        f"<pre>{escape(settings)}</pre></details></section>"
    )


def _nothing(text: str) -> str:
    return f"<p><b>{escape(text)}</b></p>"


def _short(count: int) -> str:
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:,.0f} k" if count < 10_000_000 else f"{count / 1e6:,.0f} M"
