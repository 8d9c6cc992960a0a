"""The page of ``gyre inspect --html``: one file, no scripts, light and dark."""

from __future__ import annotations

from html import escape

from flows.execution_view import ExecutionView, summary_lines
from flows.text import Decode
from tasks.sampling.outline import Line, Role

_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --text: #1c1c1a; --faint: #6b6b66;
  --rule: #dededa; --main: #1a7f37; --main-summary: #0a7c86; --sub-agent: #8e3bb0;
  --sub-agent-summary: #2456c4; --background: #8a6100; --lost: #c02626; --kept: #1a7f3714; }
@media (prefers-color-scheme: dark) { :root { --page: #161615; --text: #ececea; --faint: #9a9a94;
  --rule: #363633; --main: #5fd07e; --main-summary: #56c8d3; --sub-agent: #d08cf0;
  --sub-agent-summary: #8fb3ff; --background: #e0b34d; --lost: #ff8080; --kept: #5fd07e1c; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } p { margin: .15rem 0; }
details { border-left: 3px solid var(--rule); padding: .1rem .6rem; margin: .15rem 0; }
details.target { background: var(--kept); }
summary { cursor: pointer; } summary > * { margin-right: .8rem; }
.at, .context { color: var(--faint); } .at { font-variant-numeric: tabular-nums; }
.at { display: inline-block; min-width: 4rem; text-align: right; }
.lost { color: var(--lost); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; margin: .4rem 0; }
"""
_KINDS = ("main", "main-summary", "sub-agent", "sub-agent-summary", "background")
_INDENT_REM = 1.4


def page(view: ExecutionView, decode: Decode) -> str:
    """The execution's tree; the text of a segment opens on demand."""
    kinds = "\n".join(
        f"details.{kind} {{ border-color: var(--{kind}) }} .{kind} b {{ color: var(--{kind}) }}"
        for kind in _KINDS
    )
    title = escape(f"{view.run_id} {view.execution}")
    summary = "\n".join(f"<p>{escape(line.strip())}</p>" for line in summary_lines(view))
    lines = "\n".join(_line(line, decode) for line in view.lines)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}{kinds}</style></head>\n"
        f"<body><h1>{title}</h1>\n{summary}\n<main>\n{lines}\n</main></body></html>\n"
    )


def _line(line: Line, decode: Decode) -> str:
    text = escape(decode(line.ids.tolist()))
    kind = "context" if line.placed is None else line.placed.call.kind.value
    role = "target" if line.role is Role.TARGET else "other"
    return (
        f'<details class="{kind} {role}" style="margin-left: {line.depth * _INDENT_REM:.1f}rem">'
        f'<summary><span class="at">{line.start}</span>{_facts(line)}</summary>'
        f"<pre>{text}</pre></details>"
    )


def _facts(line: Line) -> str:
    if line.placed is None:
        return f"<span>{len(line.ids)} context</span>"
    call = line.placed.call
    facts = [
        f"<b>{len(line.ids)} {call.kind.value}</b>",
        f"<span>call {call.index}, {escape(call.agent)}</span>",
        f"<span>version {', '.join(map(str, line.versions))}</span>",
        f"<span>log-prob {line.mean_logprob:.3f}</span>",
    ]
    if line.role is Role.TARGET:
        facts.append(f"<span>trained in {line.trajectory}</span>")
    else:
        facts.append(f'<span class="lost">{line.role.value}</span>')
    return "".join(facts)
