"""``gyre train``"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from configs.load import ConfigError, load_config
from configs.run import RunConfig
from flows.comparison import compare
from flows.console import ConfigOption, RootOption, SetOption, failure, not_ready, opened
from flows.doctor.preflight import PreflightError, preflight
from flows.history import updates_of
from flows.roots import absolute_root
from flows.start import Job, run_jobs, terminal
from flows.summary import comparison_table, step_table
from storage.objects import StorageError
from storage.run import Run, create_run

SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the run.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("train")(train)


def train(
    config: ConfigOption = "quickstart",
    settings: SetOption = None,
    seed: SeedOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the new run.")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Name of a run to go on with.")
    ] = None,
    root: RootOption = None,
) -> None:
    """Train a policy and follow the run. The same run can be watched and cancelled in the UI.

    Starts a Prefect server, work pool and worker when there are none, and ends them again.

    Examples:

      gyre train --config quickstart

      gyre train --config my.yaml --seed 3 --set trajectory.cap=2

      gyre train --resume quickstart-20260101-120000
    """
    if resume:
        run = opened(resume, root)
    else:
        try:
            run = _created(config, settings, seed, name, root)
        except (ConfigError, StorageError) as error:
            raise failure(error) from None
        except PreflightError as error:
            raise not_ready(error) from None
    console = terminal()
    console.print(f"run {run.run_id} in {run.store.url}", soft_wrap=True)
    run_jobs([Job("train", run, {"run_id": run.run_id, "root": run.store.url})], console)
    _print_summary(run, console)


def _created(
    config: str, settings: list[str] | None, seed: int | None, name: str | None, root: str | None
) -> Run:
    overrides = list(settings or [])
    if seed is not None:
        overrides.append(f"seed={seed}")
    loaded = load_config(config, overrides)
    where = absolute_root(root or loaded.storage.root)
    placed: RunConfig = load_config(config, [*overrides, f"storage.root={where}"])
    run_id = name or f"{placed.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    preflight(placed, where, prefect=True)  # before anything of the run is there
    return create_run(where, run_id, placed)


def _print_summary(run: Run, console: Console) -> None:
    console.print(step_table(run, updates_of(run)))
    console.print(comparison_table(compare(run)))
    for name, key in (
        ("metrics", run.layout.metrics),
        ("report", run.layout.report),
        ("proof", run.layout.manifest),
    ):
        console.print(f"{name}: {run.store.url}/{key}", soft_wrap=True)
