"""``gyre fsck``: what is wrong with what a run has in storage."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from flows.console import ExitCode, RootOption, failure, opened
from flows.fsck.check import check_run
from flows.fsck.finding import Finding
from storage.errors import StorageError

_OUT = Console()


def register(app: typer.Typer) -> None:
    """Add ``fsck`` to the command line."""
    app.command("fsck")(fsck)


def fsck(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    root: RootOption = None,
) -> None:
    """Read everything that a run has stored and hold it against itself. Changes nothing.

    Checksums, verdicts, samples against recorded calls, ledgers, checkpoints, the first policy.
    Exit code 1 when something is damaged, missing or contradicts something else. What is only left
    over, as by a killed writer, is told and is no error.

    Examples:

      gyre fsck my-run

      gyre fsck my-run --json
    """
    run = opened(run_id, root)
    try:
        findings = check_run(run)
    except StorageError as error:
        raise failure(error, "The storage can't be read", ExitCode.FAILED) from None
    errors = sum(finding.is_error for finding in findings)
    if as_json:
        rows = [
            {"kind": one.kind, "key": one.key, "text": one.text, "error": one.is_error}
            for one in findings
        ]
        typer.echo(json.dumps({"format": 1, "run": run_id, "errors": errors, "findings": rows}))
    else:
        for finding in findings:
            _print(finding)
        verdict = f"[red]{errors} errors[/red]" if errors else "[green]no errors[/green]"
        _OUT.print(f"{escape(run_id)}: {verdict}, {len(findings) - errors} notes", highlight=False)
    if errors:
        raise typer.Exit(ExitCode.FAILED)


def _print(finding: Finding) -> None:
    style = "red" if finding.is_error else "dim"
    _OUT.print(f"[{style}]{finding.kind}[/{style}] {escape(finding.key)}", highlight=False)
    _OUT.print(f"    {escape(finding.text)}", highlight=False, soft_wrap=True)
