"""``gyre replay``: a run's sealed samples to weights once more."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from cells.checkpoint import CheckpointError
from cells.replica.client import ReplicaCallError
from flows.console import ExitCode, RootOption, failure, opened
from flows.replay import Replayed, ReplayError, replay
from storage.errors import StorageError
from storage.records import RecordError

_OUT = Console()
_SAID = Console(stderr=True)


def register(app: typer.Typer) -> None:
    """Add ``replay`` to the command line."""
    app.command("replay")(replay_run)


def replay_run(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    start: Annotated[
        int,
        typer.Option(
            "--from", min=0, help="Version of a checkpoint to start from; 0 is the first policy."
        ),
    ] = 0,
    end: Annotated[
        int | None,
        typer.Option("--to", min=1, help="Version to stop at; the newest checkpoint without it."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="Largest difference over the weights' change that is no error."),
    ] = 1e-3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    root: RootOption = None,
) -> None:
    """Train a run's sealed samples again, in the order of its ledgers, on one replica.

    The weights are compared with those of the run: difference over the weights' change, both as
    L2 norms. Exit code 1 when that is above the tolerance. The same replay twice gives the same
    bits on one machine.

    Examples:

      gyre replay my-run

      gyre replay my-run --from 8 --to 12
    """
    run = opened(run_id, root)
    try:
        found = replay(run, start=start, end=end, say=lambda text: _SAID.print(text, style="dim"))
    except (ReplayError, ReplicaCallError, CheckpointError, RecordError, StorageError) as error:
        raise failure(error, "Not replayed", ExitCode.FAILED) from None
    if as_json:
        typer.echo(json.dumps({"format": 1, "run": run_id, **asdict(found)}))
    else:
        _OUT.print(_text(run_id, found), highlight=False, soft_wrap=True)
    if found.difference is not None and found.difference.share > tolerance:
        raise typer.Exit(ExitCode.FAILED)


def _text(run_id: str, found: Replayed) -> str:
    text = (
        f"{run_id}: version {found.start} to {found.version}, {found.updates} updates, "
        f"{found.micro_steps} micro-steps\nweights sha256 {found.digest}\n"
    )
    difference = found.difference
    if difference is None:
        return f"{text}the run has no checkpoint of version {found.version} to compare with"
    if difference.identical:
        return f"{text}identical to the run's checkpoint, bit for bit"
    return (
        f"{text}difference to the run's checkpoint over the weights' change: "
        f"{difference.share:.3g}, largest {difference.largest:.3g}"
    )
