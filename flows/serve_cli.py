"""``gyre serve`` and ``gyre deploy``"""

from __future__ import annotations

import re
import threading
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from configs.load import ConfigError, load_config
from configs.run import RunConfig
from flows.console import ConfigOption, ExitCode, RootOption, SetOption, failure
from flows.roots import absolute_root
from flows.server import ServerError, ensure_pool
from flows.start import answering_server, terminal

PAGES_PORT = 4210
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("serve")(serve)
    app.command("deploy")(deploy)


def serve(
    config: ConfigOption = "quickstart",
    settings: SetOption = None,
    host: Annotated[
        str, typer.Option(help="Address of the pages. They have no password.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port of the pages; 0 takes a free one.", min=0, max=65_535)
    ] = PAGES_PORT,
    root: RootOption = None,
) -> None:
    """Keep a Prefect server, a worker and the pages of all runs up, in the foreground.

    Runs are then started, scheduled, watched and retried in the Prefect UI. Ctrl-C, a closed
    terminal and SIGTERM end the server, the worker, and what they run.

    Examples:

      gyre serve

      gyre serve --root /data/gyre --port 8080
    """
    from flows.serve import serve as run_server  # only now: it brings a web server

    loaded = _loaded(config, settings)
    where = absolute_root(root or loaded.storage.root)
    console = terminal()

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    try:
        run_server(loaded.prefect, where, host, port, threading.Event(), say)
    except KeyboardInterrupt:
        say("ended")
    except ServerError as error:
        raise failure(error, "Gyre can't be served", ExitCode.FAILED) from None


def deploy(
    config: ConfigOption = "quickstart",
    settings: SetOption = None,
    work_pool: Annotated[
        str | None, typer.Option("--work-pool", help="Work pool instead of prefect.work_pool.")
    ] = None,
    evaluate_steps: Annotated[
        bool, typer.Option("--evaluate-steps", help="Have each finished step evaluated.")
    ] = False,
    pause_on_alarm: Annotated[
        bool, typer.Option("--pause-on-alarm", help="Pause a run whose figures are out of bounds.")
    ] = False,
    train_on_problems: Annotated[
        bool, typer.Option("--train-on-problems", help="Train on new problem sets in storage.")
    ] = False,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            help="Environment variable of the flows. The value may name a block: "
            "{{ prefect.blocks.secret.NAME }}. May be given many times; it stays.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    root: RootOption = None,
) -> None:
    """Make or renew the deployments and automations on a Prefect server that runs.

    The server is that of PREFECT_API_URL, or the one on prefect.port. Schedules stay.

    Examples:

      gyre deploy

      PREFECT_API_URL=http://prefect:4200/api gyre deploy --work-pool k8s --root /shared/gyre

      gyre deploy --env "AWS_SECRET_ACCESS_KEY={{ prefect.blocks.secret.gyre-s3 }}"
    """
    loaded = _loaded(config, settings)
    given = _variables(environment or [])
    where = absolute_root(root or loaded.storage.root)
    try:
        url = answering_server(loaded.prefect, where)
    except ServerError as error:
        raise failure(error, "Nothing was deployed", ExitCode.FAILED) from None
    # Only now: prefect reads where its server is when it is imported.
    from flows.automations import make_automations
    from flows.deploy import DEPLOYED
    from flows.deploy import deploy as apply

    pool = work_pool or loaded.prefect.work_pool
    ensure_pool(pool)
    ids = apply(pool, where, given)
    table = Table(title=f"deployments in work pool {pool}, storage {where}", box=box.SIMPLE_HEAD)
    for column in ("deployment", "queue", "start it at"):
        table.add_column(column, no_wrap=True)
    for name, one in ids.items():
        page = f"{url.removesuffix('/api')}/deployments/deployment/{one}"
        table.add_row(name, DEPLOYED[name].queue, page)
    console = terminal()
    console.print(table)
    automations = make_automations(
        ids,
        evaluate_steps=evaluate_steps,
        pause_on_alarm=pause_on_alarm,
        train_on_problems=train_on_problems,
    )
    for made in automations:
        console.print(f"automation {made.name}: {'on' if made.enabled else 'off'}")


def _variables(texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise failure(f"--env {text!r}: write NAME=VALUE", "Nothing was deployed")
        found[name] = value
    return found


def _loaded(config: str, settings: list[str] | None) -> RunConfig:
    try:
        return load_config(config, settings or [])
    except ConfigError as error:
        raise failure(error) from None
