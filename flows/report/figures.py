"""The figures of the page that go by update and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flows.estimates import share_interval
from flows.report.history import LATE, TIMED_OUT, Ended, History
from flows.report.style import AMBER, BLUE, FEW, GREEN, GREY, RED, VIOLET, styled
from storage.records import UpdateMetrics


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
    """What tells of each update whether it can be trusted."""
    updates = history.updates
    figure = make_subplots(
        rows=3,
        cols=3,
        subplot_titles=tuple(panel.title for panel in _HEALTH),
        horizontal_spacing=0.08,
        vertical_spacing=0.12,
    )
    numbers = list(range(1, len(updates) + 1))
    for number, panel in enumerate(_HEALTH):
        row, column = divmod(number, 3)
        for name, colour, value in panel.lines:
            figure.add_scatter(
                name=name,
                x=numbers,
                y=[value(update) for update in updates],
                mode="lines+markers",
                line={"color": colour, "width": 1.5},
                marker={"size": 4},
                showlegend=False,
                hovertemplate="update %{x}: %{y}",
                row=row + 1,
                col=column + 1,
            )
        figure.update_yaxes(panel.axis, row=row + 1, col=column + 1)
    figure.update_xaxes(title_text="update", row=3)
    if len(numbers) <= FEW:
        figure.update_xaxes(dtick=1)
    return styled(figure, 640)


@dataclass(frozen=True)
class _Panel:
    title: str
    axis: dict[str, Any]
    lines: tuple[tuple[str, str, Callable[[UpdateMetrics], float | None]], ...]
    """Name, colour and value of each."""


_PLAIN: dict[str, Any] = {"rangemode": "tozero"}
_SHARE: dict[str, Any] = {"rangemode": "tozero", "tickformat": ".0%"}
_LOG: dict[str, Any] = {"type": "log", "tickformat": ".0e", "dtick": 1}


def _gap_of_older(update: UpdateMetrics) -> float | None:
    """Of targets that older weights than the trained ones sampled; each version counts once."""
    trained = update.policy_version - (not update.skipped)
    gaps = [gap for version, gap in update.logprob_gap_by_version.items() if version < trained]
    return fmean(gaps) if gaps else None


def _without_gradient(update: UpdateMetrics) -> float | None:
    return update.groups_without_gradient / update.groups if update.groups else None


_HEALTH = (
    _Panel(
        "staleness: mean, largest",
        _PLAIN,
        (
            ("mean", BLUE, lambda update: update.staleness_mean),
            ("largest", GREY, lambda update: update.staleness_max),
        ),
    ),
    _Panel(
        "clipped: all, below, above",
        _SHARE,
        (
            ("all", VIOLET, lambda update: update.clip_fraction),
            ("below", AMBER, lambda update: update.clip_fraction_low),
            ("above", BLUE, lambda update: update.clip_fraction_high),
        ),
    ),
    _Panel(
        "log-prob gap per token: mean, largest",
        _LOG,
        (
            ("mean", GREEN, lambda update: update.logprob_gap or None),
            ("largest", GREY, lambda update: update.logprob_gap_max or None),
        ),
    ),
    _Panel(
        "mean gap by sampler: trained, older",
        _LOG,
        (
            ("the trained version", GREEN, lambda update: update.fresh_gap or None),
            ("older versions", AMBER, _gap_of_older),
        ),
    ),
    _Panel(
        "effective samples",
        _SHARE,
        (("share of the targets", BLUE, lambda update: update.effective_samples),),
    ),
    _Panel(
        "gradient norm",
        _PLAIN,
        (("before clipping", BLUE, lambda update: update.grad_norm),),
    ),
    _Panel(
        "groups without gradient",
        _SHARE,
        (("share", RED, _without_gradient),),
    ),
    _Panel(
        "entropy, nats",
        _PLAIN,
        (("mean over targets", GREEN, lambda update: update.entropy),),
    ),
    _Panel(
        "learning rate",
        {"rangemode": "tozero", "exponentformat": "e"},
        (("rate", GREY, lambda update: update.learning_rate),),
    ),
)


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
