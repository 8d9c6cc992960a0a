"""The HTML around figures and tables: one file that needs nothing else, for light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_CONFIG = {"displayModeBar": False, "responsive": True}


def document(title: str, heading: str, about: str, body: str) -> str:
    """A whole page.

    Args:
        body: HTML; all else is text.
    """
    template = Template(files("flows.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        heading=escape(heading),
        about=escape(about),
        plotly=get_plotlyjs(),
        body=body,
    )


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """Names and values in a row."""
    shown = (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
             for name, value in facts)  # fmt: skip
    return f'<div class="tiles">{"".join(shown)}</div>'


def section(title: str, about: str, content: str) -> str:
    """A card of the page; ``content`` is HTML."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(about)}</p>{content}</section>"


def figure(shown: go.Figure) -> str:
    """A figure that the page's own script draws."""
    return str(shown.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{whole}</div>'
