"""``gyre inspect``: what the calls of one execution became."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from flows.console import ExitCode, RootOption, failure, opened
from flows.execution_view import ExecutionView, NoExecutionError, summary_lines, view_execution
from flows.inspect_page import page
from flows.start import terminal
from flows.text import Decode, decoder
from storage.objects import StorageError
from storage.records import CallKind, RecordError
from tasks.sampling.outline import Line, Role
from tasks.sampling.tree import CallTreeError

_TEXT_CHARS = 2000

KIND_STYLES = {
    CallKind.MAIN: "green",
    CallKind.MAIN_SUMMARY: "cyan",
    CallKind.SUB_AGENT: "magenta",
    CallKind.SUB_AGENT_SUMMARY: "blue",
    CallKind.BACKGROUND: "yellow",
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("inspect")(inspect)


def inspect(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    execution: Annotated[str, typer.Argument(help="Execution, for example s00000-q0003-e001.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page that needs no other file.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the text of every segment.")] = False,
    root: RootOption = None,
) -> None:
    """Show the tree of an execution's calls: kinds, versions, and which tokens are trained where.

    [bold]Examples[/bold]

      gyre inspect my-run s00000-q0003-e001

      gyre inspect my-run s00000-q0003-e001 --html execution.html
    """
    run = opened(run_id, root)
    try:
        view = view_execution(run, execution)
    except (NoExecutionError, RecordError, CallTreeError, StorageError) as error:
        raise failure(error, "The execution can't be shown") from None
    decode, out = decoder(run), terminal()
    for line in summary_lines(view):
        out.print(line)
    out.print(_tree(view, decode if text else None))
    if html is not None:
        try:
            html.write_text(page(view, decode), encoding="utf-8")
        except OSError as error:
            raise failure(error, f"{html} can't be written", ExitCode.FAILED) from None
        out.print(f"written: {html}", soft_wrap=True)


def _tree(view: ExecutionView, decode: Decode | None) -> Tree:
    top = Tree(Text(view.execution, style="bold"))
    above = [top]
    for line in view.lines:
        label = _label(line)
        if decode is not None:
            label.append("\n" + decode(line.ids.tolist())[:_TEXT_CHARS], style="dim")
        # A line's branch hangs below the last line one level up.
        del above[line.depth + 1 :]
        above.append(above[line.depth].add(label))
    return top


def _label(line: Line) -> Text:
    if line.placed is None:
        return Text(f"{line.start:>6}  {len(line.ids)} context", style="dim")
    call = line.placed.call
    label = Text(f"{line.start:>6}  ")
    label.append(f"{len(line.ids)} {call.kind.value}", style=KIND_STYLES[call.kind])
    label.append(f"  call {call.index}  {call.agent}  version {', '.join(map(str, line.versions))}")
    if line.role is Role.TARGET:
        label.append(f"  trained in {line.trajectory}", style="bold")
    else:
        label.append(f"  {line.role.value}", style="red")
    return label
