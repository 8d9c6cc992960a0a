"""What all figures share. Colours of ink and lines are set by the page, for light and dark."""

from __future__ import annotations

import plotly.graph_objects as go

BLUE, PALE, AMBER, GREEN, RED, GREY, VIOLET = (
    "#3b82f6",
    "#93c5fd",
    "#f59e0b",
    "#10b981",
    "#ef4444",
    "#9ca3af",
    "#8b5cf6",
)
FEW = 12
"""Whole numbers that an axis has room for."""
_CLEAR = "rgba(0,0,0,0)"


def styled(figure: go.Figure, height: int) -> go.Figure:
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
