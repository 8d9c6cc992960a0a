"""What the commands of ``gyre`` share: options, exit codes, and one block for what went wrong."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from configs.load import ConfigError
from configs.run import RunConfig
from flows.roots import absolute_root
from storage.objects import StorageError
from storage.run import Run, open_run

_ERRORS = Console(stderr=True)


class ExitCode(IntEnum):
    """How a command of ``gyre`` ends, other than well."""

    FAILED = 1
    BAD_INPUT = 2
    NOT_READY = 3
    """The machine or the storage can't carry it; nothing was started."""
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
RootOption = Annotated[
    str | None, typer.Option("--root", help="Storage folder or URL instead of storage.root.")
]


def opened(run_id: str, root: str | None) -> Run:
    """The run of that name.

    Raises:
        typer.Exit: there is none, or it can't be read; that was printed.
    """
    try:
        return open_run(storage_root(root), run_id)
    except (ConfigError, StorageError) as error:
        raise failure(error, "The run can't be opened") from None


def storage_root(root: str | None) -> str:
    """The storage that is asked for, or that of the settings' defaults."""
    return absolute_root(root or RunConfig().storage.root)


def failure(
    error: object,
    title: str = "The configuration can't be used",
    code: ExitCode = ExitCode.BAD_INPUT,
) -> typer.Exit:
    """Print one block about what went wrong, to be followed by raising what is returned."""
    _ERRORS.print(f"[bold red]{escape(title)}[/bold red]")
    _ERRORS.print(escape(str(error)), highlight=False, soft_wrap=True)
    return typer.Exit(code)


def not_ready(error: object) -> typer.Exit:
    """As ``failure``, for what a preflight has found."""
    return failure(error, "Nothing was started: a run can't be carried here", ExitCode.NOT_READY)
