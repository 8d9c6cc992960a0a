"""The figures of the page. Colours of ink and lines are set by the page, for light and dark."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cells.levels import Level
from cells.scheduler import Role
from flows.estimates import share_interval
from flows.report.history import LATE, TIMED_OUT, Ended, History
from flows.report.roles import FAILED

BLUE, AMBER, GREEN, RED, GREY, VIOLET = (
    "#3b82f6",
    "#f59e0b",
    "#10b981",
    "#ef4444",
    "#9ca3af",
    "#8b5cf6",
)
ROLES = {
    Role.ROLLOUT: BLUE,
    Role.TRAINING: AMBER,
    Role.SWITCHING: GREY,
    FAILED: RED,
}
_MOST_POINTS = 3000
_FEW = 12
"""Whole numbers that an axis has room for."""
_CLEAR = "rgba(0,0,0,0)"


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
    if newest <= _FEW:
        figure.update_xaxes(dtick=1)
    figure.update_yaxes(title_text="pass rate", range=[0, 1], tickformat=".0%")
    return _styled(figure, 340)


def roles_and_waterlevel(history: History) -> go.Figure:
    """The cells' roles as a Gantt chart over the waterlevel, on one clock."""
    cells = sorted({span.cell for span in history.spans})
    unit, name = _clock(history.ended - history.began)
    gantt = 40 + 30 * len(cells)
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        row_heights=[gantt, 240],
    )
    for role, colour in ROLES.items():
        spans = [span for span in history.spans if span.role == role]
        if not spans:
            continue
        figure.add_bar(
            name=str(role),
            orientation="h",
            y=[span.cell for span in spans],
            base=[(span.start - history.began) / unit for span in spans],
            x=[(span.end - span.start) / unit for span in spans],
            customdata=[(span.end - span.start, span.why) for span in spans],
            marker={"color": colour, "line": {"width": 0}},
            width=0.7,
            hovertemplate=(
                f"%{{y}}: from %{{base:.2f}} {name}, %{{customdata[0]:.1f}} s<br>%{{customdata[1]}}"
            ),
            row=1,
            col=1,
        )
    _add_waterlevel(figure, history, unit)
    figure.update_xaxes(range=[0, max((history.ended - history.began) / unit, 1e-3)])
    figure.update_xaxes(title_text=name, row=2, col=1)
    figure.update_yaxes(title_text="executions", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(
        autorange="reversed",
        type="category",
        categoryarray=cells,
        ticksuffix=" ",
        showgrid=False,
        row=1,
        col=1,
    )
    figure.update_layout(barmode="overlay", hovermode="closest")
    return _styled(figure, gantt + 330)


def _clock(seconds: float) -> tuple[float, str]:
    """A unit of time that gives a run of that length handy numbers: its seconds and its name."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")


def _add_waterlevel(figure: go.Figure, history: History, unit: float) -> None:
    levels = _thinned(history.levels) or _levels_of(history.executions)
    times = [(level[0] - history.began) / unit for level in levels]
    for name, colour, place in (("running", BLUE, 1), ("waiting for a place", RED, 2)):
        values = [level[place] for level in levels]
        if not any(values):
            continue
        figure.add_scatter(
            name=name,
            x=times,
            y=values,
            mode="lines",
            stackgroup="level",
            line={"width": 0, "shape": "hv"},
            fillcolor=colour,
            hovertemplate="%{y}",
            row=2,
            col=1,
        )
    if history.levels:
        figure.add_scatter(
            name="places of serving cells",
            x=times,
            y=[level[3] for level in levels],
            mode="lines",
            line={"color": GREY, "width": 1.5, "shape": "hv", "dash": "dot"},
            hovertemplate="%{y}",
            row=2,
            col=1,
        )


_Water = tuple[float, int, int, int]
"""Time, running, waiting, places."""


def _thinned(levels: Sequence[Level]) -> list[_Water]:
    stride = max(1, -(-len(levels) // _MOST_POINTS))
    return [(row.at, row.running, row.queued, row.capacity) for row in levels[::stride]]


def _levels_of(executions: Sequence[Ended]) -> list[_Water]:
    """Where the manager kept no journal, counted from when executions began and ended."""
    changes = sorted(
        [(one.started_at, 1) for one in executions] + [(one.ended_at, -1) for one in executions]
    )
    live, found = 0, []
    for at, change in changes:
        live += change
        found.append((at, live, 0, 0))
    return found


def durations(history: History) -> go.Figure:
    """How long executions worked, and how long they waited in the gateway."""
    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=("seconds of work", "seconds of waiting for a place or a switch"),
        horizontal_spacing=0.1,
    )
    completed = [one for one in history.executions if not one.timed_out]
    late = [one for one in history.executions if one.timed_out]
    for column, values in (
        (1, [[one.worked_s for one in part] for part in (completed, late)]),
        (2, [[one.waited_s for one in part] for part in (completed, late)]),
    ):
        top = max((max(part) for part in values if part), default=1.0) or 1.0
        for name, colour, part in zip(("ended", "timed out"), (BLUE, RED), values, strict=True):
            if part:
                figure.add_histogram(
                    name=name,
                    x=part,
                    xbins={"start": 0, "end": top * 1.001, "size": top / 40},
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
    return _styled(figure, 320)


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
    if len(numbers) <= _FEW:
        figure.update_xaxes(dtick=1)
    return _styled(figure, 300)


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
    return _styled(figure, 320)


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
    figure.update_layout(barmode="stack", bargap=0.35)
    return _styled(figure, 300)


def _styled(figure: go.Figure, height: int) -> go.Figure:
    """Without a template: the page sets the colours, and each would add ten kilobytes."""
    figure.update_layout(
        template=None,
        height=height,
        margin={"l": 68, "r": 16, "t": 28, "b": 84},
        paper_bgcolor=_CLEAR,
        plot_bgcolor=_CLEAR,
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "bgcolor": _CLEAR,
        },
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    figure.update_xaxes(title_font_size=13)
    figure.update_yaxes(title_font_size=13, title_standoff=10)
    figure.update_annotations(font_size=13)
    return figure
