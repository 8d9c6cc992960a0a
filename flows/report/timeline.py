"""The figure that goes by the clock: roles of the cells over the waterlevel."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cells.levels import Level
from cells.scheduler import Role
from flows.report.history import Ended, History
from flows.report.roles import FAILED
from flows.report.style import AMBER, BLUE, GREY, PALE, RED, styled

_ROLES = {
    Role.ROLLOUT: BLUE,
    Role.TRAINING: AMBER,
    Role.SWITCHING: GREY,
    FAILED: RED,
}
_MOST_POINTS = 3000


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
    for role, colour in _ROLES.items():
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
    return styled(figure, gantt + 330)


def _clock(seconds: float) -> tuple[float, str]:
    """A unit of time that gives a run of that length handy numbers: its seconds and its name."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")


def _add_waterlevel(figure: go.Figure, history: History, unit: float) -> None:
    levels = _thinned(history.levels) or _levels_of(history.executions)
    times = [(level[0] - history.began) / unit for level in levels]
    for name, colour, place in (("running", BLUE, 1), ("waiting", PALE, 2)):
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
