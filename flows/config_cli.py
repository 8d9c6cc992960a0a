"""``gyre config``: the settings of a run, shown, checked and described."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from cells.replica.place import LayoutError
from cells.replica.planned import check_model
from cells.replica.shape import ShapeError
from configs.load import ConfigError, dump_config, load_config, preset_names
from configs.run import RunConfig
from configs.schema import SettingRow, markdown, setting_rows
from flows.console import ConfigOption, SetOption, failure
from tasks.problems.check import check_problems
from tasks.problems.source import ProblemSourceError

_OUT = Console()


_app = typer.Typer(
    no_args_is_help=True,
    help="Show, check and describe the settings of a run.",
    rich_markup_mode="rich",
)


def register(app: typer.Typer) -> None:
    """Add ``config`` to the command line."""
    app.add_typer(_app, name="config")


@_app.command()
def show(
    config: ConfigOption = "quickstart",
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print every setting of a run as it would be used: preset or file, then the environment,
    then --set.

    [bold]Examples[/bold]

      gyre config show

      gyre config show --config my.yaml --set trajectory.cap=3 --set cells.executions_per_cell=8

      GYRE_SET_TRAINING__STEPS=2 gyre config show --json
    """
    loaded = _loaded(config, settings)
    if as_json:
        typer.echo(loaded.model_dump_json(indent=2))
    elif _OUT.is_terminal:
        _OUT.print(Syntax(dump_config(loaded), "yaml", background_color="default"))
    else:
        typer.echo(dump_config(loaded), nl=False)


@_app.command()
def check(config: ConfigOption = "quickstart", settings: SetOption = None) -> None:
    """Check a configuration without starting anything. Exit code 0 when it is good, 2 when not.

    A bad one is answered with the key, the value, and what is allowed there. The problems are
    loaded, and must fit the model's context; the layout must fit the model.

    [bold]Examples[/bold]

      gyre config check --config my.yaml

      gyre config check --set training.updates_per_step=8
    """
    loaded = _loaded(config, settings)
    try:
        check_model(loaded)
        check_problems(loaded)
    except (LayoutError, ProblemSourceError, ShapeError) as error:
        raise failure(error) from None
    executions = loaded.rollout.queries * loaded.rollout.group_size
    updates = loaded.training.steps * loaded.training.updates_per_step
    cells = ", ".join(cell.name for cell in loaded.cells.cells)
    typer.echo(
        f"ok: {loaded.name}: {loaded.training.steps} steps of {executions} executions, "
        f"{updates} updates, cells {cells} on {loaded.cells.device.value}"
    )


@_app.command()
def schema(
    section: Annotated[
        str, typer.Argument(help="Only the settings below this key, for example training.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON Schema, for editors and other programs.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="The page docs/settings.md.")
    ] = False,
) -> None:
    """Describe every setting: default, unit, what is allowed, what it means.

    [bold]Examples[/bold]

      gyre config schema

      gyre config schema training.objective

      gyre config schema --json > gyre.schema.json
    """
    if as_json:
        typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))
    elif as_markdown:
        typer.echo(markdown(), nl=False)
    else:
        _print_table(section)


def _loaded(config: str, settings: list[str] | None) -> RunConfig:
    try:
        return load_config(config, settings or ())
    except ConfigError as error:
        raise failure(error) from None


def _print_table(section: str) -> None:
    rows = [row for row in setting_rows() if _below(row, section)]
    if not rows:
        sections = sorted({row.key.partition(".")[0] for row in setting_rows()})
        raise failure(
            f"no setting {section!r}; there are: {', '.join(sections)}", title="Unknown setting"
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", style="cyan", no_wrap=True)
    table.add_column("default", overflow="fold")
    table.add_column("allowed", overflow="fold")
    table.add_column("meaning", ratio=1)
    for row in rows:
        unit = "" if row.unit == "1" else row.unit
        table.add_row(
            row.key, *map(escape, (f"{row.default} {unit}", row.allowed, row.description))
        )
    _OUT.print(table)
    _OUT.print(f"presets: {', '.join(preset_names())}", highlight=False)


def _below(row: SettingRow, section: str) -> bool:
    return not section or row.key == section or row.key.startswith((f"{section}.", f"{section}[]"))
