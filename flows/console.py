"""What the commands of ``gyre`` share: options, exit codes, and one block for what went wrong."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

_ERRORS = Console(stderr=True)


class ExitCode(IntEnum):
    """How a command of ``gyre`` ends, other than well."""

    FAILED = 1
    BAD_INPUT = 2
    CANCELLED = 130


ConfigOption = Annotated[
    str,
    typer.Option("--config", "-c", help="Preset or path of a YAML file.", metavar="NAME|FILE"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="Change a setting. The value is YAML. May be given many times.",
        metavar="KEY=VALUE",
    ),
]


def failure(
    error: object,
    title: str = "The configuration can't be used",
    code: ExitCode = ExitCode.BAD_INPUT,
) -> typer.Exit:
    """Print one block about what went wrong, to be followed by raising what is returned."""
    _ERRORS.print(f"[bold red]{escape(title)}[/bold red]")
    _ERRORS.print(escape(str(error)), highlight=False, soft_wrap=True)
    return typer.Exit(code)
