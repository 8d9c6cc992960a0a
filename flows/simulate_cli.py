"""``gyre simulate`` and ``gyre plan``: what a policy would gain, before anything is run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console
from rich.table import Table

from cells.replica.memory import Machine
from cells.scheduler import POLICY_NAMES
from cells.simulation import report
from cells.simulation.alternatives import (
    alternatives_columns,
    alternatives_rows,
    alternatives_value,
    compare_alternatives,
)
from cells.simulation.compare import Comparison, compare
from cells.simulation.durations import read_durations, with_durations
from cells.simulation.picture import html_table, page
from cells.simulation.plan import Hardware, plan
from cells.simulation.published import compare_published, published_workloads
from cells.simulation.recorded import recorded_times, workload_from_run
from cells.simulation.rollout import SimulationError
from cells.simulation.words import facts, recorded_facts
from cells.simulation.workload import Origin, Source, Workload, load_workload
from configs.load import ConfigError, load_config
from configs.workloads import workload_path
from flows.layout_plan import COLUMNS, plan_layout, plan_rows, plan_words
from flows.roots import absolute_root
from storage.objects import StorageError
from storage.run import open_run

# Where no terminal sets the width, a table must not lose its words.
_OUT = Console() if sys.stdout.isatty() else Console(width=140)
_ERRORS = Console(stderr=True)
_BAD_INPUT = 2
_SHORT = 16
"""Characters of a name that a narrow terminal must not break."""
_PUBLISHED = "published"
_EXPECTED = (
    ConfigError,
    OSError,
    SimulationError,
    StorageError,
    ValueError,
    yaml.YAMLError,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a parameter of the workload, such as cells.count=8. Repeatable.",
    ),
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, max=1000, help="Simulations of each figure.")
]
FirstSeedOption = Annotated[
    int, typer.Option("--first-seed", min=0, help="The seed of the first of them.")
]
FromRunOption = Annotated[
    str | None, typer.Option("--from-run", metavar="RUN", help="Simulate a recorded run.")
]
RootOption = Annotated[str, typer.Option("--root", help="Storage folder or URL of the run.")]
DurationsOption = Annotated[
    Path | None,
    typer.Option("--durations", help="CSV of measured durations: columns problem, seconds."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("simulate")(simulate)
    app.command("plan")(plan_cells)


def simulate(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG|published",
            help="A shipped workload, the path of a workload file, or: published.",
        ),
    ] = None,
    from_run: FromRunOption = None,
    root: RootOption = ".gyre",
    durations: DurationsOption = None,
    settings: SetOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help=f"Only this policy: {', '.join(POLICY_NAMES)}. Repeatable."),
    ] = None,
    seeds: SeedsOption = 5,
    first_seed: FirstSeedOption = 0,
    assumptions: Annotated[
        bool,
        typer.Option(
            "--assumptions", help="Published workloads: the figures under other assumptions."
        ),
    ] = False,
    as_json: JsonOption = False,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", help="Write a page with tables, Gantt charts and waterlevels."),
    ] = None,
) -> None:
    """Simulate cells under every policy, on the same executions."""
    drawn = range(first_seed, first_seed + seeds)
    try:
        if config == _PUBLISHED or assumptions:
            if from_run or durations or policy or settings:
                _fail(
                    "published and --assumptions take no --from-run, --durations, --set or --policy"
                )
            if assumptions:
                _assumptions(config, drawn, as_json, report_file)
            else:
                _published(drawn, as_json, report_file)
            return
        workload = _changed(_workload(config, from_run, root, durations), settings or ())
        unknown = [name for name in policy or () if name not in POLICY_NAMES]
        if unknown:
            _fail(f"no policy {unknown[0]!r}; there are {', '.join(POLICY_NAMES)}")
        recorded = recorded_times(open_run(absolute_root(root), from_run)) if from_run else None
        comparison = compare(workload, drawn, policy or POLICY_NAMES, _progress)
        if report_file:
            _write_page(report_file, workload.name, [_html_comparison(comparison)], [comparison])
    except _EXPECTED as error:
        _fail(str(error))
    if as_json:
        _print_json(report.comparison_value(comparison, recorded))
        return
    _print_table(workload.name, report.COMPARISON_COLUMNS, report.comparison_rows(comparison))
    _OUT.print(facts(comparison), highlight=False)
    if recorded:
        _OUT.print(recorded_facts(recorded, comparison), highlight=False)


def plan_cells(
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs in all.")] = None,
    parameters: Annotated[
        float | None,
        typer.Option("--parameters", min=1e-6, help="Parameters of the model, billions."),
    ] = None,
    layout_of: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="Preset or file: what its cells.layout needs of each GPU, and how long a switch "
            "takes. Without --gpus and --parameters.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of --config."),
    ] = None,
    network: Annotated[
        float, typer.Option("--network", min=0.01, help="GB/s of a GPU between cells.")
    ] = 50.0,
    host: Annotated[
        float, typer.Option("--host", min=0.01, help="GB/s of a GPU to main memory.")
    ] = 50.0,
    active: Annotated[
        float | None,
        typer.Option("--active", min=1e-6, help="Active ones of a token, billions; default all."),
    ] = None,
    config: Annotated[
        str, typer.Option("--workload", help="Workload that gives calls and batch.")
    ] = "published_122b_nl2repo",
    from_run: FromRunOption = None,
    root: RootOption = ".gyre",
    durations: DurationsOption = None,
    memory: Annotated[float, typer.Option("--memory", min=0.1, help="GB of a GPU.")] = 80.0,
    tflops: Annotated[float, typer.Option(min=0.01, help="Dense bf16 TFLOP/s of a GPU.")] = 989.0,
    utilisation: Annotated[
        float, typer.Option(min=0.001, max=1, help="Share of them that training reaches.")
    ] = 0.35,
    decode: Annotated[
        float, typer.Option("--decode", min=0.1, help="Output tokens/s of a full GPU.")
    ] = 1000.0,
    kv_bytes: Annotated[
        float, typer.Option("--kv-bytes", min=1, help="KV cache of a token, bytes.")
    ] = 100_000.0,
    context: Annotated[
        float, typer.Option("--context", min=1, help="Context of an execution, tokens.")
    ] = 100_000.0,
    seeds: SeedsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Plan the cells: how many, of what size, which split, and what elastic would gain.

    With --config, plan a layout: memory of a GPU by part, cells, seconds of a switch.
    """
    if layout_of is not None:
        machine = Machine(memory_gb=memory, network=network, host=host)
        _plan_layout(layout_of, changes or (), machine, as_json)
        return
    if gpus is None or parameters is None:
        _fail("give --gpus and --parameters, or --config")
    hardware = Hardware(
        gpus=gpus,
        parameters_b=parameters,
        active_parameters_b=active or parameters,
        memory_gb=memory,
        tflops=tflops,
        utilisation=utilisation,
        decode_tokens_per_s=decode,
        kv_bytes_per_token=kv_bytes,
        context_tokens=context,
    )
    try:
        workload = _workload(None if from_run else config, from_run, root, durations)
        options = plan(hardware, workload, range(seeds), _progress)
    except _EXPECTED as error:
        _fail(str(error))
    if as_json:
        _print_json(report.plan_value(options))
        return
    title = f"{workload.name} on {gpus} GPUs, fastest first"
    _print_table(title, report.PLAN_COLUMNS, report.plan_rows(options))


def _plan_layout(config: str, changes: Sequence[str], machine: Machine, as_json: bool) -> None:
    try:
        found = plan_layout(load_config(config, changes), machine)
    except _EXPECTED as error:
        _fail(str(error))
    if as_json:
        _print_json(found)
        return
    _print_table(f"{config}: memory of the fullest GPU", COLUMNS, plan_rows(found))
    _OUT.print(plan_words(found), highlight=False)


def _workload(
    config: str | None, from_run: str | None, root: str, durations: Path | None
) -> Workload:
    if (config is None) == (from_run is None):
        _fail("give a workload or --from-run, and not both")
    if from_run is not None:
        workload = workload_from_run(open_run(absolute_root(root), from_run))
    else:
        path = Path(str(config))
        workload = load_workload(path if path.is_file() else workload_path(str(config)))
    if durations is None:
        return workload
    return with_durations(workload, read_durations(durations), f"measured: {durations.name}")


def _changed(workload: Workload, settings: Sequence[str]) -> Workload:
    if not settings:
        return workload
    pairs = [text.partition("=") for text in settings]
    values = {name: yaml.safe_load(value) for name, _, value in pairs}
    return workload.with_values(values, Source(origin=Origin.ASSUMED, note="the command line"))


def _published(seeds: Sequence[int], as_json: bool, report_file: Path | None) -> None:
    rows, comparisons = compare_published(seeds, _progress)
    if report_file:
        tables = [html_table(report.PUBLISHED_COLUMNS, report.published_rows(rows))]
        _write_page(report_file, "Published and simulated", tables, comparisons)
    if as_json:
        _print_json(report.published_value(rows, comparisons))
        return
    _print_table("Published and simulated", report.PUBLISHED_COLUMNS, report.published_rows(rows))
    for comparison in comparisons:
        _OUT.print(facts(comparison), highlight=False)


def _assumptions(
    config: str | None, seeds: Sequence[int], as_json: bool, report_file: Path | None
) -> None:
    names = tuple(published_workloads())
    if config != _PUBLISHED and config not in names:
        _fail(f"--assumptions knows {_PUBLISHED}, {', '.join(names)}")
    if report_file:
        _fail("--assumptions writes no --report")
    chosen = names if config == _PUBLISHED else (str(config),)
    variations = compare_alternatives(chosen, seeds, _progress)
    if as_json:
        _print_json(alternatives_value(variations))
        return
    for name in chosen:
        own = [variation for variation in variations if variation.workload == name]
        columns = alternatives_columns(own[0])
        _print_table(own[0].rows[0].name, columns, alternatives_rows(own))


def _html_comparison(comparison: Comparison) -> str:
    return html_table(report.COMPARISON_COLUMNS, report.comparison_rows(comparison))


def _write_page(
    file: Path, title: str, tables: Sequence[str], comparisons: Sequence[Comparison]
) -> None:
    outcomes = [found[0] for c in comparisons for found in c.outcomes.values()]
    file.write_text(page(title, tables, outcomes), encoding="utf-8")


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title)
    for number, column in enumerate(columns):
        first = number == 0
        short = first and all(len(row[0]) <= _SHORT for row in rows)
        table.add_column(column, justify="left" if first else "right", no_wrap=short)
    for row in rows:
        table.add_row(*row)
    _OUT.print(table)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value))


def _progress(what: str) -> None:
    if _ERRORS.is_terminal:
        _ERRORS.print(f"simulated {what}", style="dim", highlight=False)


def _fail(message: str) -> NoReturn:
    _ERRORS.print(message, style="red", markup=False, highlight=False)
    raise typer.Exit(_BAD_INPUT)
