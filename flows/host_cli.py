"""``gyre host``: a cell on a machine of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from configs.load import ConfigError
from flows.cell_host import CellHostError, await_run, cell_of, keep_host
from flows.console import ExitCode, RootOption, failure, storage_root
from storage.objects import StorageError

_OUT = Console()


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("host")(host)


def host(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    cell: Annotated[str, typer.Argument(metavar="CELL", help="Name of the cell.")],
    root: RootOption = None,
    wait: Annotated[
        float,
        typer.Option("--wait", min=1, help="Seconds without work after which the command ends."),
    ] = 3600,
    node: Annotated[
        int,
        typer.Option(
            "--node",
            min=0,
            help="Which machine of a cell that spans several: 0 is that of its address, 1 the "
            "first of its nodes.",
        ),
    ] = 0,
) -> None:
    """Keep a cell's host on this machine, for a run whose flow works on another one.

    For cells with elsewhere: true in cells.cells. Storage must be a folder that both machines
    mount at the same path. Starts the engine and the replica when an attempt at the run wants
    them, also one that comes later, and ends them with it. Ctrl-C ends it.

    Examples:

      gyre host my-run b --root /shared/gyre

      gyre host my-run b --node 1 --root /shared/gyre
    """

    def say(text: str) -> None:
        _OUT.print(text, highlight=False, soft_wrap=True, markup=False)

    try:
        run = await_run(storage_root(root), run_id, wait, say)
        cell_of(run, cell, node)
        keep_host(run, cell, wait, say, node)
    except (ConfigError, StorageError) as error:
        raise failure(error, "The cell can't be hosted") from None
    except (CellHostError, TimeoutError) as error:
        raise failure(error, "The cell is not hosted any more", ExitCode.FAILED) from None
    except KeyboardInterrupt:
        say(f"cell {cell}: ended")
        raise typer.Exit(ExitCode.CANCELLED) from None
