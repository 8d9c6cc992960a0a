"""``gyre sweep``"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from configs.load import ConfigError, absolute_source, load_config
from configs.run import RunConfig
from flows.console import (
    ConfigOption,
    ExitCode,
    RootOption,
    SetOption,
    failure,
    not_ready,
    opened,
    storage_root,
)
from flows.doctor.preflight import PreflightError, preflight
from flows.roots import absolute_root
from flows.server import ServerError, orchestration
from flows.start import home_of, terminal
from flows.sweep.plan import SweepPlan, axis, keep_plan, make_plan, page_key, plan_key
from flows.sweep.share import check_source
from storage.objects import StorageError, Store

_POLL_S = 2.0


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("sweep")(sweep)


def sweep(
    name: Annotated[str, typer.Argument(help="Name of the sweep; its runs are named after it.")],
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param", "-p", metavar="KEY=VALUE,VALUE", help="A setting to vary. May be repeated."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each point.", min=1, max=64)] = 1,
    parallel: Annotated[int, typer.Option(help="Trainings at once.", min=1, max=64)] = 1,
    config: ConfigOption = "quickstart",
    settings: SetOption = None,
    from_run: Annotated[
        str | None,
        typer.Option(
            "--from-run",
            metavar="RUN",
            help="All points train their first step on this run's rollouts and verdicts.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check all points and start nothing.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Write the page of a sweep that exists, start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    root: RootOption = None,
) -> None:
    """Train every point of a grid of settings with every seed, and compare them.

    All points are checked before anything starts. The same command goes on with a sweep that was
    stopped. Its page says which point is ahead, by how much, and whether that is more than noise.

    Examples:

      gyre sweep caps --param trajectory.cap=1,2,5,none --seeds 3

      gyre sweep rates -p training.learning_rate=1e-4,5e-4 -p trajectory.cap=1,5 --config my.yaml

      gyre sweep caps2 --param trajectory.cap=1,5 --from-run quickstart-20260101-120000

      gyre sweep caps --show --json
    """
    console = terminal(stderr=as_json)
    if show:
        store = Store(storage_root(root))
        if not store.exists(plan_key(name)):
            raise failure(f"no sweep {name!r} in {store.url}", "There is nothing to show")
        _report(store, store.read_record(plan_key(name), SweepPlan), console, as_json)
        return
    try:
        plan, first, where = _planned(name, param, seeds, config, settings, from_run, root)
    except (ConfigError, StorageError) as error:
        raise failure(error, "The sweep can't be run") from None
    console.print(_plan_table(plan))
    if check:
        return
    try:
        preflight(first, where, prefect=True)
        keep_plan(Store(where), plan)
    except PreflightError as error:
        raise not_ready(error) from None
    except (ConfigError, StorageError) as error:
        raise failure(error, "The sweep can't be run") from None
    parameters = {
        "name": name,
        "parameters": [one.model_dump(mode="json") for one in plan.axes],
        "seeds": seeds,
        "parallel": parallel,
        "config": absolute_source(config),
        "overrides": settings or [],
        "from_run": from_run or "",
        "root": where,
    }
    _run(parameters, first, where, console)
    _report(Store(where), plan, console, as_json)


def _planned(
    name: str,
    param: list[str] | None,
    seeds: int,
    config: str,
    settings: list[str] | None,
    from_run: str | None,
    root: str | None,
) -> tuple[SweepPlan, RunConfig, str]:
    """The plan, the settings of its first run, and the storage."""
    overrides = settings or []
    if from_run is None:
        source = None
        where = absolute_root(root or load_config(config, overrides).storage.root)
    else:
        where = storage_root(root)
        source = opened(from_run, root)
        check_source(source)
    axes = [axis(text) for text in param or []]
    plan, configs = make_plan(name, axes, seeds, config, overrides, where, source)
    return plan, configs[plan.runs[0].run_id], where


def _plan_table(plan: SweepPlan) -> Table:
    count = f"{len(plan.points)} points, {len(plan.seeds)} seeds, {len(plan.runs)} runs"
    table = Table(title=f"sweep {plan.name}: {count}", box=box.SIMPLE_HEAD)
    for one in plan.axes:
        table.add_column(one.key)
    table.add_column("runs")
    for number, point in enumerate(plan.points):
        runs = ", ".join(one.run_id for one in plan.runs if one.point == number)
        table.add_row(*point.values, runs)
    if plan.from_run:
        table.caption = f"the first step of all trains the rollouts of run {plan.from_run}"
    return table


def _run(parameters: dict[str, Any], first: RunConfig, where: str, console: Console) -> None:
    try:
        with orchestration(first.prefect, home_of(where), console.print) as prefect:
            # Only now: prefect reads where its server is when it is imported.
            from prefect.client.orchestration import get_client

            from flows.deploy import deploy

            deployment = deploy(first.prefect.work_pool, where)["sweep"]
            with get_client(sync_client=True) as client:
                made = client.create_flow_run_from_deployment(deployment, parameters=parameters)
                console.print(f"{prefect.ui_url}/runs/flow-run/{made.id}", soft_wrap=True)
                state = _follow(client, made.id, parameters["name"], Store(where), console, prefect)
    except ServerError as error:
        raise failure(error, "Prefect can't be used", ExitCode.FAILED) from None
    if not state.is_completed():
        cancelled = state.is_cancelled() or state.is_cancelling()
        code = ExitCode.CANCELLED if cancelled else ExitCode.FAILED
        raise failure(state.message or "", f"sweep ended as {state.name}", code)


def _follow(client: Any, made: Any, name: str, store: Store, console: Console, prefect: Any) -> Any:
    """Says which runs have ended until the sweep has; Ctrl-C cancels it and waits for its end."""
    from prefect.states import Cancelling

    from flows.sweep.results import read_results

    plan = store.read_record(plan_key(name), SweepPlan)
    said: set[str] = set()
    while True:
        try:
            state = client.read_flow_run(made).state
            for run in read_results(store, plan).runs:
                if run.done and run.run_id not in said and run.last is not None:
                    said.add(run.run_id)
                    label = plan.points[run.point].label
                    console.print(f"{run.run_id} ({label}): pass rate {run.last.pass_rate:.3f}")
            if state is not None and state.is_final():
                return state
            prefect.check()
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            console.print("cancelling: the sweep and its runs are being ended")
            client.set_flow_run_state(made, Cancelling(), force=True)


def _report(store: Store, plan: SweepPlan, console: Console, as_json: bool) -> None:
    from flows.sweep.page import difference_table, point_columns, point_rows, render
    from flows.sweep.results import read_results, results_value, verdict_line

    results = read_results(store, plan)
    store.write(page_key(plan.name), render(results).encode())
    console.print(_table(point_columns(results), point_rows(results)))
    if results.differences:
        console.print(_table(*difference_table(results)))
    console.print(verdict_line(results))
    console.print(f"page: {store.url}/{page_key(plan.name)}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(results_value(results)))


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
