"""The figures of the page that go by update and step."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flows.estimates import share_interval
from flows.report.history import LATE, TIMED_OUT, Ended, History
from flows.report.style import AMBER, BLUE, FEW, GREEN, GREY, RED, VIOLET, styled


def pass_rates(history: History) -> go.Figure:
    """Training batches and held-out problems over weight versions."""
    figure = go.Figure()
    updates = [update for update in history.updates if update.pass_rate is not None]
    if updates:
        figure.add_scatter(
            name="training batch of an update",
            x=[update.policy_version for update in updates],
            y=[update.pass_rate for update in updates],
            mode="lines+markers",
            line={"color": BLUE, "width": 1.5},
            marker={"size": 5},
            hovertemplate="version %{x}: %{y:.3f}",
        )
    versions = history.comparison.versions
    if versions:
        rates = [result.pass_rate for result in versions]
        intervals = [share_interval(rate) for rate in rates]
        figure.add_scatter(
            name="held-out problems, 95 % interval",
            x=[result.evaluation.version for result in versions],
            y=[rate.mean for rate in rates],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [high - r.mean for (_, high), r in zip(intervals, rates, strict=True)],
                "arrayminus": [r.mean - low for (low, _), r in zip(intervals, rates, strict=True)],
                "thickness": 2,
                "width": 6,
            },
            mode="markers",
            marker={"size": 11, "color": GREEN, "symbol": "diamond"},
            hovertemplate="version %{x}: %{y:.3f}",
        )
    ceiling = history.comparison.ceiling
    if ceiling is not None:
        figure.add_hline(
            y=ceiling.pass_rate.mean,
            line={"color": VIOLET, "dash": "dash", "width": 1.5},
            annotation_text=f"ceiling {ceiling.pass_rate.mean:.3f}",
            annotation_position="top left",
        )
    newest = max((update.policy_version for update in history.updates), default=1)
    edge = 0.02 * newest + 0.2  # the marks of the first and the last version lie on the ends
    figure.update_xaxes(title_text="weight version", range=[-edge, newest + edge])
    if newest <= FEW:
        figure.update_xaxes(dtick=1)
    figure.update_yaxes(title_text="pass rate", range=[0, 1], tickformat=".0%")
    return styled(figure, 340)


def durations(history: History) -> go.Figure:
    """How long executions worked, and how long they waited before and while they did."""
    figure = make_subplots(
        rows=1,
        cols=3,
        subplot_titles=(
            "at work",
            "in the queue, before they began",
            "in the gateway, for a place or a switch",
        ),
        horizontal_spacing=0.07,
    )
    ended = [one for one in history.executions if not one.timed_out]
    timed_out = [one for one in history.executions if one.timed_out]
    begins = _step_begins(history)
    measures: tuple[Callable[[Ended], float], ...] = (
        lambda one: one.worked_s,
        lambda one: max(one.started_at - begins[one.step], 0.0),
        lambda one: one.waited_s,
    )
    for column, seconds in enumerate(measures, start=1):
        parts = [[seconds(one) for one in part] for part in (ended, timed_out)]
        top = max(max(part, default=0.0) for part in parts) or 1.0
        for name, colour, part in zip(("ended", "timed out"), (BLUE, RED), parts, strict=True):
            if part:
                figure.add_histogram(
                    name=name,
                    x=part,
                    xbins={"start": 0, "end": top * 1.001, "size": top / 30},
                    marker={"color": colour, "line": {"width": 0}},
                    showlegend=column == 1,
                    legendgroup=name,
                    hovertemplate="%{x} s: %{y}",
                    row=1,
                    col=column,
                )
    figure.update_xaxes(title_text="seconds", rangemode="tozero")
    figure.update_yaxes(title_text="executions", row=1, col=1)
    figure.update_layout(barmode="stack", bargap=0.03)
    return styled(figure, 320)


def _step_begins(history: History) -> dict[int, float]:
    """When each step's executions could have begun, by the first that is known of it."""
    known = [(level.step, level.at) for level in history.levels]
    known += [(one.step, one.started_at) for one in history.executions]
    begins: dict[int, float] = {}
    for step, at in known:
        begins[step] = min(begins.get(step, at), at)
    return begins


def health(history: History) -> go.Figure:
    """Staleness, clip share and log-prob gap of each update."""
    figure = make_subplots(
        rows=1,
        cols=3,
        subplot_titles=("staleness, updates", "clipped samples", "log-prob gap, mean per token"),
        horizontal_spacing=0.08,
    )
    numbers = list(range(1, len(history.updates) + 1))
    series = (
        (1, "mean", BLUE, [update.staleness_mean for update in history.updates]),
        (1, "largest", GREY, [update.staleness_max for update in history.updates]),
        (2, "share", VIOLET, [update.clip_fraction for update in history.updates]),
        (3, "gap", GREEN, [update.logprob_gap or None for update in history.updates]),
    )
    for column, name, colour, values in series:
        figure.add_scatter(
            name=name,
            x=numbers,
            y=values,
            mode="lines+markers",
            line={"color": colour, "width": 1.5},
            marker={"size": 4},
            showlegend=column == 1,
            hovertemplate="update %{x}: %{y}",
            row=1,
            col=column,
        )
    figure.update_xaxes(title_text="update")
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    figure.update_yaxes(rangemode="tozero", tickformat=".0%", row=1, col=2)
    figure.update_yaxes(type="log", tickformat=".0e", dtick=1, row=1, col=3)
    if len(numbers) <= FEW:
        figure.update_xaxes(dtick=1)
    return styled(figure, 300)


def seconds_of_steps(history: History) -> go.Figure:
    """Where the time of each step went."""
    figure = go.Figure()
    steps = sorted({update.step for update in history.updates})
    for name, colour, field in (
        ("rollouts", BLUE, "rollout_s"),
        ("training", AMBER, "train_s"),
        ("a cell was switching", RED, "switch_s"),
    ):
        figure.add_bar(
            name=name,
            x=steps,
            y=[
                sum(getattr(update, field) for update in history.updates if update.step == step)
                for step in steps
            ],
            marker={"color": colour},
            hovertemplate="step %{x}: %{y:.1f} s",
        )
    whole = {done.step: done.seconds for done in history.done}
    if whole:
        figure.add_scatter(
            name="whole step",
            x=list(whole),
            y=list(whole.values()),
            mode="markers",
            marker={"symbol": "line-ew", "size": 26, "line": {"width": 2, "color": GREY}},
            hovertemplate="step %{x}: %{y:.1f} s",
        )
    figure.update_xaxes(title_text="step", dtick=max(1, len(steps) // 20))
    figure.update_yaxes(title_text="seconds", rangemode="tozero")
    figure.update_layout(barmode="group", bargap=0.25)
    return styled(figure, 320)


def verdicts(history: History) -> go.Figure | None:
    """Executions that were excluded, by reason, that came too late, or that timed out; None where
    every execution ended in time with a reward."""
    reasons = sorted({reason for counts in history.verdicts.values() for reason in counts})
    if not reasons:
        return None
    colours = {TIMED_OUT: AMBER, LATE: VIOLET}
    others = iter((RED, GREY, BLUE, GREEN) * len(reasons))
    figure = go.Figure()
    for reason in reasons:
        figure.add_bar(
            name=reason,
            x=list(history.verdicts),
            y=[counts[reason] for counts in history.verdicts.values()],
            marker={"color": colours.get(reason) or next(others)},
            hovertemplate="step %{x}: %{y}",
        )
    figure.update_xaxes(title_text="step", dtick=max(1, len(history.verdicts) // 20))
    figure.update_yaxes(title_text="executions", rangemode="tozero")
    if max(counts.total() for counts in history.verdicts.values()) <= FEW:
        figure.update_yaxes(dtick=1)
    figure.update_layout(barmode="stack", bargap=0.35, showlegend=True)
    return styled(figure, 300)
