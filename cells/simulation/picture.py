"""A self-contained page: the Gantt chart of the cells' roles and the waterlevel, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from cells.scheduler import Role
from cells.simulation.outcome import Outcome

_COLOURS = {Role.ROLLOUT: "#3b82f6", Role.TRAINING: "#f59e0b", Role.SWITCHING: "#9ca3af"}
_RUNNING, _QUEUED = "#3b82f6", "#ef4444"
_MOST_POINTS = 2000
# The bar of tools would lie over the first cell.
_CONFIG = {"displayModeBar": False, "responsive": True}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 0; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; background: #ffffff; color: #1f2937; }}
table {{ border-collapse: collapse; display: block; margin: 1rem 0; overflow-x: auto; }}
th, td {{ padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #d1d5db; }}
th:first-child, td:first-child {{ text-align: left; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #111827; color: #e5e7eb; }}
  th, td {{ border-color: #374151; }}
}}
</style>
<script>{plotly}</script></head><body>
<h1>{title}</h1>
{body}
<script>
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function tint() {{
  const ink = dark.matches ? "#e5e7eb" : "#1f2937", line = dark.matches ? "#374151" : "#d1d5db";
  for (const plot of document.querySelectorAll(".plotly-graph-div")) {{
    const change = {{ "font.color": ink }};
    for (const axis of ["xaxis", "xaxis2", "yaxis", "yaxis2"]) {{
      change[axis + ".gridcolor"] = line;
      change[axis + ".zerolinecolor"] = line;
    }}
    Plotly.relayout(plot, change);
  }}
}}
dark.addEventListener("change", tint);
tint();
</script></body></html>
"""


def page(title: str, tables: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    """The page as text: HTML tables, then a picture for each outcome."""
    parts = list(tables)
    for outcome in outcomes:
        heading = f"{outcome.workload}, {outcome.policy}: {outcome.hours:.2f} h"
        parts.append(f"<h2>{escape(heading)}</h2>")
        parts.append(
            _figure(outcome).to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
        )
    return _PAGE.format(title=escape(title), plotly=get_plotlyjs(), body="\n".join(parts))


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text cells."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure(outcome: Outcome) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.55, 0.45])
    for role, colour in _COLOURS.items():
        _add_role(figure, outcome, role, colour)
    _add_levels(figure, outcome)
    cells = sorted({interval.cell_id for interval in outcome.intervals})
    figure.update_xaxes(range=[0, outcome.hours])
    figure.update_xaxes(title_text="hours", row=2, col=1)
    figure.update_yaxes(title_text="executions", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(
        autorange="reversed", categoryarray=cells, ticksuffix=" ", showgrid=False, row=1, col=1
    )
    figure.update_layout(
        barmode="overlay",
        height=260 + 24 * len(cells),
        margin={"l": 70, "r": 20, "t": 10, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "traceorder": "normal", "y": -0.18, "yanchor": "top"},
    )
    return figure


def _add_role(figure: go.Figure, outcome: Outcome, role: Role, colour: str) -> None:
    chosen = [interval for interval in outcome.intervals if interval.role is role]
    figure.add_trace(
        go.Bar(
            name=role.value,
            orientation="h",
            y=[interval.cell_id for interval in chosen],
            base=[interval.start / 3600 for interval in chosen],
            x=[(interval.end - interval.start) / 3600 for interval in chosen],
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="%{y}: %{base:.2f} h, for %{x:.2f} h",
        ),
        row=1,
        col=1,
    )


def _add_levels(figure: go.Figure, outcome: Outcome) -> None:
    # A long run has more decisions than a screen has columns.
    levels = outcome.levels[:: max(1, len(outcome.levels) // _MOST_POINTS)]
    hours = [level.time / 3600 for level in levels]
    series = (
        ("running", _RUNNING, [level.running for level in levels]),
        ("queued", _QUEUED, [level.queued for level in levels]),
    )
    for name, colour, values in series:
        figure.add_trace(
            go.Scatter(
                name=name,
                x=hours,
                y=values,
                stackgroup="level",
                line={"width": 0, "shape": "hv"},
                fillcolor=colour,
            ),
            row=2,
            col=1,
        )
