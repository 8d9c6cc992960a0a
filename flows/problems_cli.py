"""``gyre problems``"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from flows.console import RootOption, failure, opened
from flows.start import terminal
from storage.layout import execution_id
from storage.records import StepPlan, VerdictRecord
from storage.run import Run
from tasks.problems.difficulty import difficulty
from tasks.rollout.group import find_result
from tasks.scoring.rescoring import steps_of
from tasks.scoring.verdicts import newest_verdict


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("problems")(problems)


def problems(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    least: Annotated[
        float, typer.Option("--min", help="Only pass rates from here.", min=0, max=1)
    ] = 0.0,
    most: Annotated[
        float, typer.Option("--max", help="Only pass rates up to here.", min=0, max=1)
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    root: RootOption = None,
) -> None:
    """Show how hard the problems of a run were: pass rates from the newest verdicts of its training
    executions, the hardest first. The names can go into problems.include of another run.

    Examples:

      gyre problems quickstart-20260101-120000

      gyre problems quickstart-20260101-120000 --min 0.1 --max 0.9 --json
    """
    if least > most:
        raise failure(f"--min {least:g} is above --max {most:g}", "No pass rate is like that")
    rows = [
        row
        for row in difficulty(_verdicts(opened(run, root)))
        if row.pass_rate is not None and least <= row.pass_rate <= most
    ]
    if as_json:
        typer.echo(json.dumps({"run": run, "problems": [asdict(row) for row in rows]}))
        return
    table = Table(title=f"problems of {run}")
    table.add_column("problem", overflow="fold")
    for heading in ("pass rate", "solved", "executions", "excluded", "timed out"):
        table.add_column(heading, justify="right")
    for row in rows:
        counts = (row.solved, row.executions, row.excluded, row.timed_out)
        table.add_row(row.problem_id, f"{row.pass_rate:.3f}", *map(str, counts))
    terminal().print(table)


def _verdicts(run: Run) -> Iterator[tuple[str, VerdictRecord | None]]:
    """Problem and newest verdict of each execution that has ended."""
    for step in steps_of(run):
        plan = run.store.read_record(run.layout.step_plan(step), StepPlan)
        for query in plan.queries:
            for member in range(query.group_size):
                name = execution_id(query.query_id, member)
                verdict = newest_verdict(run.store, run.layout, name)
                if verdict is not None or find_result(run, name) is not None:
                    yield query.problem_id, verdict
