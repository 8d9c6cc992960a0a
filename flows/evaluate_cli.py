"""``gyre evaluate``"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cells.checkpoint import latest_checkpoint
from configs.load import ConfigError
from flows.comparison import compare, comparison_value
from flows.console import RootOption, failure, opened
from flows.held_out import HeldOut, ceiling_run
from flows.start import Job, run_jobs, terminal
from flows.summary import comparison_table
from storage.objects import StorageError
from storage.run import Run

_MOST = 100_000


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("evaluate")(evaluate)


def evaluate(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    version: Annotated[
        list[int] | None,
        typer.Option(
            help="Checkpointed version, the newest when left out. May be repeated.", min=0
        ),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(help="Held-out problems.", min=1, max=_MOST)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Executions of each, for pass@k.", min=1, max=1024)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the problems.", min=0)] = None,
    ceiling: Annotated[
        bool,
        typer.Option(
            "--ceiling", help="Also evaluate a model fitted to demonstrations without mistakes."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    root: RootOption = None,
) -> None:
    """Evaluate a run's policy on the held-out problems, beside what was evaluated before.

    Pass rates with their standard errors and 95 % intervals, pass@k, and gains paired over the
    problems. What is stored is not run again. Other problems, samples or seeds than the run's own
    are kept beside them.

    Examples:

      gyre evaluate quickstart-20260101-120000

      gyre evaluate quickstart-20260101-120000 --version 0 --version 24 --problems 256

      gyre evaluate quickstart-20260101-120000 --samples 8 --ceiling --json
    """
    opened_run = opened(run, root)
    held_out = HeldOut.of(opened_run, problems, samples, seed)
    console = terminal(stderr=as_json)
    try:
        jobs = _jobs(opened_run, held_out, version, ceiling)
    except (ConfigError, StorageError) as error:
        raise failure(error, "It can't be evaluated") from None
    if jobs:
        run_jobs(jobs, console)
    found = compare(opened_run, held_out)
    if as_json:
        typer.echo(json.dumps({"run": run, **comparison_value(found)}))
    else:
        console.print(comparison_table(found))


def _jobs(run: Run, held_out: HeldOut, versions: list[int] | None, ceiling: bool) -> list[Job]:
    """What is asked for and not stored yet."""
    if not versions:
        checkpoint = latest_checkpoint(run)
        versions = [0 if checkpoint is None else checkpoint.manifest.version]
    wanted = [(run, version) for version in dict.fromkeys(versions)]
    if ceiling:
        wanted.append((ceiling_run(run), 0))
    return [
        Job(
            "evaluate",
            one,
            {
                "run_id": one.run_id,
                "root": one.store.url,
                "version": version,
                "problems": held_out.problems,
                "samples": held_out.samples,
                "seed": held_out.seed,
            },
        )
        for one, version in wanted
        if not one.store.exists(held_out.key(one.layout, version))
    ]
