"""Starting flow runs from a terminal and following them to their end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.cells import PrefectConfig
from flows.console import ExitCode, failure, not_ready
from flows.cost import Meter
from flows.doctor.preflight import PreflightError, preflight
from flows.live import Screen, screen_on
from flows.server import Orchestration, ServerError, healthy, orchestration
from storage.run import Run

_LOG_WIDTH = 160
"""Tables of a run are wide; in a log file there is no reason to squeeze them."""


@dataclass(frozen=True)
class Job:
    """A flow run to be started: the deployment's name, and for which run."""

    flow: str
    run: Run
    parameters: dict[str, Any]


def terminal(*, stderr: bool = False) -> Console:
    """A console for a run's lines and tables, as wide as the terminal, or as a log file."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _LOG_WIDTH
    return Console(file=stream, highlight=False, markup=False, width=width)


def prefect_home(run: Run) -> Path:
    """Where a server that is started for this run keeps its data."""
    return home_of(run.store.url)


def home_of(root: str) -> Path:
    """Where a server that is started for this storage keeps its data."""
    return Path(root if "://" not in root else ".gyre").resolve() / "prefect"


def run_jobs(jobs: Sequence[Job], console: Console) -> None:
    """Start one flow run after the other and follow each to its end.

    Starts a Prefect server, work pool and worker when there are none, and ends them again.

    Raises:
        typer.Exit: one did not complete; what went wrong was printed.
    """
    first = jobs[0].run
    try:
        for job in jobs:
            preflight(job.run.config, job.run.store.url, job.run.run_id, prefect=True)
    except PreflightError as error:
        raise not_ready(error) from None
    try:
        with (
            screen_on(console) as screen,
            orchestration(first.config.prefect, prefect_home(first), screen.say) as prefect,
        ):
            for job in jobs:
                _run(job, screen, prefect)
    except ServerError as error:
        raise failure(error, "Prefect can't be used", ExitCode.FAILED) from None


def _run(job: Job, screen: Screen, prefect: Orchestration) -> None:
    # Only now: prefect reads where its server is when it is imported.
    from prefect.client.orchestration import get_client

    from flows.deploy import deploy
    from flows.follow import follow
    from flows.silence import seen_from_here

    deployment = deploy(job.run.config.prefect.work_pool, job.run.store.url)[job.flow]
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run_from_deployment(deployment, parameters=job.parameters)
    screen.say(f"{prefect.ui_url}/runs/flow-run/{flow_run.id}")
    meter = Meter(prefect, prefect_home(job.run))
    runs_here = job.flow == "train" and (prefect.own_server or seen_from_here(job.run.store))
    state = follow(flow_run.id, job.run, screen, prefect.check, runs_here=runs_here)
    screen.say(meter.read(job.run, str(flow_run.id)).line())
    if not state.is_completed():
        cancelled = state.is_cancelled() or state.is_cancelling()
        raise failure(
            f"{state.message or ''}\nlogs: {job.run.store.url}/{job.run.layout.prefix}/logs",
            f"{job.flow} ended as {state.name}",
            ExitCode.CANCELLED if cancelled else ExitCode.FAILED,
        )


def use_server(run: Run) -> str:
    """Make prefect, which reads it when it is imported, look for its server where a run of this
    configuration has it. Returns the address of its API."""
    url = os.environ.setdefault(
        "PREFECT_API_URL", f"http://127.0.0.1:{run.config.prefect.port}/api"
    )
    os.environ.setdefault("PREFECT_HOME", str(prefect_home(run)))
    return url


def answering_server(config: PrefectConfig, root: str) -> str:
    """Make prefect look for its server where a run of this configuration has it, and return the
    address of its API.

    Raises:
        ServerError: none answers there.
    """
    url = os.environ.setdefault("PREFECT_API_URL", f"http://127.0.0.1:{config.port}/api")
    os.environ.setdefault("PREFECT_HOME", str(home_of(root)))
    if not healthy(url):
        raise ServerError(
            f"no Prefect server answers at {url}: start one with gyre serve, or name another with "
            f"PREFECT_API_URL"
        )
    return url
