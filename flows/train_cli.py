"""``gyre train`` and ``gyre evaluate``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from configs.load import ConfigError, load_config
from configs.run import RunConfig
from flows.console import ConfigOption, ExitCode, SetOption, failure
from flows.roots import absolute_root
from flows.server import ServerError, orchestration
from storage.objects import StorageError
from storage.run import Run, create_run, open_run

# Tables of a run are wide; in a log file there is no reason to squeeze them.
_WIDTH = None if sys.stdout.isatty() else 160
_console = Console(highlight=False, soft_wrap=True, markup=False, width=_WIDTH)

SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the run.")]
RootOption = Annotated[
    str | None, typer.Option("--root", help="Storage folder or URL instead of storage.root.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("train")(train)
    app.command("evaluate")(evaluate)


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
    try:
        run = _resumed(resume, root) if resume else _created(config, settings, seed, name, root)
    except (ConfigError, StorageError) as error:
        raise failure(error) from None
    _console.print(f"run {run.run_id} in {run.store.url}")
    _start_and_follow(run, "train", {"run_id": run.run_id, "root": run.store.url})


def evaluate(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    version: Annotated[
        int | None, typer.Option(help="Checkpointed version; the newest when left out.")
    ] = None,
    root: RootOption = None,
) -> None:
    """Evaluate a run's policy on the held-out problems.

    Example:

      gyre evaluate quickstart-20260101-120000 --version 24
    """
    try:
        opened = _resumed(run, root)
    except (ConfigError, StorageError) as error:
        raise failure(error) from None
    parameters = {"run_id": run, "root": opened.store.url, "version": version}
    _start_and_follow(opened, "evaluate", parameters)


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
    return create_run(where, run_id, placed)


def _resumed(run_id: str, root: str | None) -> Run:
    return open_run(absolute_root(root or RunConfig().storage.root), run_id)


def _start_and_follow(run: Run, flow: str, parameters: dict[str, Any]) -> None:
    home = Path(run.store.url if "://" not in run.store.url else ".gyre").resolve() / "prefect"
    try:
        with orchestration(run.config.prefect, home, _console.print) as prefect:
            # Only now: prefect reads where its server is when it is imported.
            from prefect.client.orchestration import get_client

            from flows.deploy import deploy
            from flows.follow import follow

            deployment = deploy(run.config.prefect.work_pool, run.store.url)[flow]
            with get_client(sync_client=True) as client:
                flow_run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
            _console.print(f"{prefect.ui_url}/runs/flow-run/{flow_run.id}")
            state = follow(flow_run.id, run, _console.print, prefect.check)
    except ServerError as error:
        raise failure(error, "Prefect can't be used", ExitCode.FAILED) from None
    if state.is_completed():
        _print_summary(run)
        return
    raise failure(
        f"{state.message or ''}\nlogs: {run.store.url}/{run.layout.prefix}/logs",
        f"{flow} ended as {state.name}",
        ExitCode.CANCELLED if state.is_cancelled() or state.is_cancelling() else ExitCode.FAILED,
    )


def _print_summary(run: Run) -> None:
    from flows.comparison import compare
    from flows.history import updates_of
    from flows.summary import comparison_table, step_table

    _console.print(step_table(run, updates_of(run)))
    _console.print(comparison_table(compare(run)))
    _console.print(f"metrics: {run.store.url}/{run.layout.metrics}")
    _console.print(f"proof: {run.store.url}/{run.layout.manifest}")
