"""``gyre doctor``: whether a run can be carried here, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.load import ConfigError, load_config
from configs.run import RunConfig
from flows.console import ConfigOption, ExitCode, SetOption, failure
from flows.doctor import environment, machine, processes
from flows.doctor.finding import Finding, Status
from flows.doctor.preflight import findings
from flows.roots import absolute_root

FORMAT = 1
"""Of what ``--json`` prints."""

_OUT = Console()
_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to the command line."""
    app.command("doctor")(doctor)


def doctor(
    config: ConfigOption = "quickstart",
    settings: SetOption = None,
    root: Annotated[
        str | None, typer.Option("--root", help="Storage folder instead of storage.root.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check this machine, its environment and the storage for a run of a configuration.

    Starts nothing and leaves nothing. Exit code 0 when a run can start (warnings are no obstacle),
    3 when a row fails, 2 for a bad configuration.

    Examples:

      gyre doctor

      gyre doctor --config my.yaml --json
    """
    try:
        loaded = load_config(config, settings or ())
    except ConfigError as error:
        raise failure(error) from None
    found = list(_all(loaded, absolute_root(root or loaded.storage.root)))
    failed = any(finding.status is Status.FAIL for finding in found)
    if as_json:
        _print_json(found, ready=not failed)
    else:
        _print_table(found)
    if failed:
        raise typer.Exit(ExitCode.NOT_READY)


def _all(config: RunConfig, root: str) -> Iterator[Finding]:
    yield environment.python()
    yield from findings(config, root, prefect=True)
    yield environment.locked_packages()
    yield machine.memory(config)
    yield machine.shared_memory()
    yield machine.rdma()
    yield machine.clock()
    yield from processes.stale_processes()
    yield processes.leftovers()


def _print_json(found: list[Finding], *, ready: bool) -> None:
    rows = [
        {"check": one.check, "status": one.status, "found": one.found, "advice": one.advice}
        for one in found
    ]
    typer.echo(json.dumps({"format": FORMAT, "ready": ready, "checks": rows}, indent=2))


def _print_table(found: list[Finding]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", ratio=1, overflow="fold")
    for one in found:
        advice = f"\n[bold]{escape(one.advice)}[/bold]" if one.advice else ""
        style = _STYLES[one.status]
        table.add_row(one.check, f"[{style}]{one.status}[/{style}]", escape(one.found) + advice)
    _OUT.print(table)
    counted = {status: sum(one.status is status for one in found) for status in Status}
    _OUT.print(", ".join(f"{count} {status}" for status, count in counted.items()))
