"""``gyre runs``, ``gyre show``, ``gyre report`` and ``gyre attach``: looking at runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from configs.load import ConfigError
from flows.console import ExitCode, RootOption, failure, opened, storage_root
from flows.overview import RUN_COLUMNS, Overview, RunState, look_at, overview_value, run_row
from flows.start import terminal
from flows.summary import comparison_table, step_table
from storage.objects import StorageError, Store
from storage.records import RecordError
from storage.run import open_run

RunArgument = Annotated[str, typer.Argument(help="Name of the run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_NUMBERS = ("seed", "step", "held out before", "after", "gain")
_COLOURS = {
    RunState.NEW: "bright_black",
    RunState.RUNNING: "cyan",
    RunState.DONE: "green",
    RunState.UNFINISHED: "yellow",
}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("runs")(runs)
    app.command("show")(show)
    app.command("report")(report)
    app.command("attach")(attach)


def runs(root: RootOption = None, as_json: JsonOption = False) -> None:
    """List the runs in storage: state, settings, progress, held-out pass rate before and after.

    Examples:

      gyre runs

      gyre runs --root s3://bucket/gyre --json
    """
    where = storage_root(root)
    found, unreadable = [], []
    for name in Store(where).children("runs"):
        try:
            found.append(look_at(open_run(where, name)))
        except (ConfigError, StorageError, RecordError) as error:
            unreadable.append((name, str(error)))
    found.sort(key=lambda overview: overview.began_at or 0.0)
    if as_json:
        rows = [overview_value(overview) for overview in found]
        for row in rows:
            row.pop("updates")  # one of `gyre show` has them
        bad = [{"run": name, "error": text} for name, text in unreadable]
        typer.echo(json.dumps({"root": where, "runs": rows, "unreadable": bad}))
        return
    console = terminal()
    if not found and not unreadable:
        console.print(f"no runs in {where}; gyre train makes one", soft_wrap=True)
        return
    console.print(_runs_table(found))
    for name, text in unreadable:
        console.print(f"{name} can't be read: {text}", style="red", soft_wrap=True)


def show(run: RunArgument, root: RootOption = None, as_json: JsonOption = False) -> None:
    """Show what a run did: its steps, and its held-out pass rate.

    Examples:

      gyre show quickstart-20260101-120000

      gyre show quickstart-20260101-120000 --json
    """
    opened_run = opened(run, root)
    try:
        overview = look_at(opened_run)
    except (StorageError, RecordError) as error:
        raise failure(error, "The run can't be read", ExitCode.FAILED) from None
    if as_json:
        typer.echo(json.dumps(overview_value(overview)))
        return
    console = terminal()
    console.print(_runs_table([overview]))
    console.print(step_table(opened_run, list(overview.updates)))
    console.print(comparison_table(overview.comparison))
    console.print(f"stored in {opened_run.store.url}/{opened_run.layout.prefix}", soft_wrap=True)


def report(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="File to write instead of the run's own.", metavar="FILE")
    ] = None,
    root: RootOption = None,
) -> None:
    """Write the page about a run, finished or not: one HTML file that needs nothing else.

    Examples:

      gyre report quickstart-20260101-120000

      gyre report quickstart-20260101-120000 --out run.html
    """
    opened_run = opened(run, root)
    from flows.report import make_report, write_report  # brings plotly: a second

    try:
        if out is None:
            where = f"{opened_run.store.url}/{write_report(opened_run)}"
        else:
            out.write_text(make_report(opened_run), encoding="utf-8")
            where = str(out)
    except (StorageError, RecordError, OSError) as error:
        raise failure(error, "No report was written", ExitCode.FAILED) from None
    terminal().print(where, soft_wrap=True)


def attach(run: RunArgument, root: RootOption = None) -> None:
    """Join a run that is under way, with the live table of `gyre train`. Ctrl-C leaves it running.

    Says where a run has ended that is not under way.

    Example:

      gyre attach quickstart-20260101-120000
    """
    from flows.attach import watch_run

    opened_run = opened(run, root)
    console = terminal()
    try:
        ended = watch_run(opened_run, console)
        overview = look_at(opened_run)
    except (StorageError, RecordError) as error:
        raise failure(error, "The run can't be read", ExitCode.FAILED) from None
    if not ended:
        console.print(f"left: gyre attach {run} joins again", soft_wrap=True)
        return
    console.print(_runs_table([overview]))
    if overview.updates:
        console.print(step_table(opened_run, list(overview.updates)))
        console.print(comparison_table(overview.comparison))
    if overview.state is RunState.UNFINISHED:
        console.print(f"go on with it: gyre train --resume {run}", soft_wrap=True)


def _runs_table(overviews: list[Overview]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in RUN_COLUMNS:
        justify: Literal["left", "right"] = "right" if heading in _NUMBERS else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for overview in overviews:
        name, state, *rest = run_row(overview)
        table.add_row(name, Text(state, style=_COLOURS[overview.state]), *rest)
    return table
