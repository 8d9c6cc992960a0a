"""``gyre schedule``: what is started by the clock. ``gyre pause``: what stops after its step."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from configs.load import ConfigError, absolute_source, load_config
from flows.console import ConfigOption, ExitCode, RootOption, SetOption, failure, opened
from flows.roots import absolute_root
from flows.server import ServerError
from flows.start import answering_server, terminal

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_app = typer.Typer(no_args_is_help=True, help="Flows that are started by the clock.")
_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_DEPLOYMENTS = ("train", "evaluate", "sweep", "rescore")

TimezoneOption = Annotated[
    str, typer.Option("--timezone", help="Of the cron expression, for example Europe/Berlin.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(_app, name="schedule")
    app.command("pause")(pause)


@_app.command("train")
def schedule_train(
    name: Annotated[str, typer.Argument(help="Name of the schedule.")],
    cron: Annotated[str, typer.Option("--cron", help='When, for example "0 2 * * 6".')],
    config: ConfigOption = "quickstart",
    settings: SetOption = None,
    timezone: TimezoneOption = "UTC",
    root: RootOption = None,
) -> None:
    """Train a new run each time.

    Examples:

      gyre schedule train weekly --cron "0 2 * * 6" --config my.yaml
    """
    try:
        load_config(config, settings or [])
    except ConfigError as error:
        raise failure(error) from None
    parameters = {"config": absolute_source(config), "overrides": settings or []}
    _add("train", name, cron, timezone, parameters, root)


@_app.command("evaluate")
def schedule_evaluate(
    name: Annotated[str, typer.Argument(help="Name of the schedule.")],
    run: Annotated[str, typer.Option("--run", help="Name of the run.")],
    cron: Annotated[str, typer.Option("--cron", help='When, for example "0 3 * * *".')],
    problems: Annotated[int | None, typer.Option(help="Held-out problems.", min=1)] = None,
    samples: Annotated[int | None, typer.Option(help="Executions of each.", min=1)] = None,
    timezone: TimezoneOption = "UTC",
    root: RootOption = None,
) -> None:
    """Evaluate the newest checkpoint of a run each time; a version is evaluated once.

    Examples:

      gyre schedule evaluate nightly --run first --cron "0 3 * * *"
    """
    opened(run, root)
    parameters = {"run_id": run, "problems": problems, "samples": samples}
    _add("evaluate", name, cron, timezone, parameters, root)


@_app.command("list")
def schedule_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    root: RootOption = None,
) -> None:
    """Show the schedules of all deployments.

    Examples:

      gyre schedule list
    """
    with _client(root) as client:
        rows = [
            {
                "name": one.slug or str(one.id),
                "flow": flow,
                "cron": getattr(one.schedule, "cron", str(one.schedule)),
                "timezone": getattr(one.schedule, "timezone", None) or "UTC",
                "active": one.active,
                "parameters": one.parameters,
            }
            for flow, deployment in _deployments(client)
            for one in client.read_deployment_schedules(deployment)
        ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("name", "flow", "cron", "timezone", "active", "parameters"):
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    terminal().print(table)


@_app.command("remove")
def schedule_remove(
    name: Annotated[str, typer.Argument(help="Name of the schedule.")],
    root: RootOption = None,
) -> None:
    """Remove a schedule; runs that it has started stay.

    Examples:

      gyre schedule remove nightly
    """
    with _client(root) as client:
        for flow, deployment in _deployments(client):
            for one in client.read_deployment_schedules(deployment):
                if name in (one.slug, str(one.id)):
                    client.delete_deployment_schedule(deployment, one.id)
                    terminal().print(f"schedule {name} of {flow} is removed")
                    return
    raise failure(f"no schedule {name!r}: gyre schedule list shows them", "Nothing was removed")


def pause(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    undo: Annotated[
        bool, typer.Option("--undo", help="Take it back before the step ends.")
    ] = False,
    root: RootOption = None,
) -> None:
    """Have a run stop after the step under way and give its cells back.

    Resume in the Prefect UI, or gyre train --resume, goes on with the next step.

    Examples:

      gyre pause first
    """
    from flows.pause import ask_pause, forget_pause  # only now: it brings prefect

    found = opened(run, root)
    if undo:
        asked = forget_pause(found)
        terminal().print(f"run {run} goes on" if asked else f"run {run} was not to pause")
        return
    ask_pause(found)
    terminal().print(f"run {run} pauses when its step is done")


def _add(
    flow: str,
    name: str,
    cron: str,
    timezone: str,
    parameters: dict[str, Any],
    root: str | None,
) -> None:
    if not _SLUG.fullmatch(name):
        raise failure(f"{name!r}: small letters, digits and dashes", "That is no name")
    with _client(root) as client:
        # Only now: prefect reads where its server is when it is imported.
        from prefect.client.schemas.actions import DeploymentScheduleCreate
        from prefect.client.schemas.schedules import CronSchedule

        deployments = dict(_deployments(client))
        if flow not in deployments:
            raise failure("gyre deploy makes it", f"There is no deployment {flow}")
        for other, deployment in deployments.items():
            if any(one.slug == name for one in client.read_deployment_schedules(deployment)):
                raise failure(
                    f"a schedule {name!r} of {other} is there: remove it, or take another name",
                    "Nothing was scheduled",
                )
        try:
            when = CronSchedule(cron=cron, timezone=timezone)
        except ValueError as error:
            raise failure(error, f"{cron!r} in {timezone} is no time") from None
        made = DeploymentScheduleCreate(
            schedule=when,
            slug=name,
            parameters={key: value for key, value in parameters.items() if value is not None},
        )
        client.create_deployment_schedules(deployments[flow], [made])
    terminal().print(f"schedule {name}: {flow} at {cron!r} ({timezone})")


def _client(root: str | None) -> SyncPrefectClient:
    config = load_config()
    try:
        answering_server(config.prefect, absolute_root(root or config.storage.root))
    except ServerError as error:
        raise failure(error, "Prefect can't be used", ExitCode.FAILED) from None
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _deployments(client: SyncPrefectClient) -> list[tuple[str, Any]]:
    from prefect.exceptions import ObjectNotFound

    found = []
    for name in _DEPLOYMENTS:
        try:
            found.append((name, client.read_deployment_by_name(f"{name}/{name}").id))
        except ObjectNotFound:
            continue
    return found
