"""The ``gyre`` command line."""

from __future__ import annotations

import signal
from importlib.metadata import version
from typing import Annotated

import typer

from flows import (
    config_cli,
    doctor_cli,
    evaluate_cli,
    export_cli,
    fsck_cli,
    gc_cli,
    harness_cli,
    host_cli,
    inspect_cli,
    problems_cli,
    replay_cli,
    rescore_cli,
    runs_cli,
    samples_cli,
    schedule_cli,
    serve_cli,
    simulate_cli,
    sweep_cli,
    train_cli,
)

app = typer.Typer(
    name="gyre",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    help="""Reinforcement learning for long-horizon coding agents on cells that move between rollout
and training.

[bold]First run[/bold]

  gyre train --config quickstart

[bold]An own configuration[/bold]

  gyre config show > my.yaml

  gyre config check --config my.yaml

  gyre train --config my.yaml --set training.steps=2
""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gyre {version('gyre-rl')}")
        raise typer.Exit


@app.callback()
def _gyre(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


train_cli.register(app)
rescore_cli.register(app)
problems_cli.register(app)
sweep_cli.register(app)
serve_cli.register(app)
host_cli.register(app)
schedule_cli.register(app)
evaluate_cli.register(app)
export_cli.register(app)
runs_cli.register(app)
inspect_cli.register(app)
samples_cli.register(app)
simulate_cli.register(app)
config_cli.register(app)
doctor_cli.register(app)
fsck_cli.register(app)
replay_cli.register(app)
gc_cli.register(app)
harness_cli.register(app)


def main() -> None:
    """Run the command line. A closed terminal or a SIGTERM ends it as Ctrl-C does: what it started
    is ended too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    app()


if __name__ == "__main__":
    main()
