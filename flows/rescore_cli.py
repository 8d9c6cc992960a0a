"""``gyre rescore``"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.console import RootOption, failure, opened
from flows.start import Job, run_jobs, terminal
from storage.errors import StorageError
from tasks.scoring.rescoring import VerdictState, preserved


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("rescore")(rescore)


def rescore(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    step: Annotated[int | None, typer.Option(help="Only executions of this step.", min=0)] = None,
    state: Annotated[
        VerdictState | None, typer.Option(help="Only those with such a newest verdict.")
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(help="Only those excluded for this reason: evaluator, storage, ..."),
    ] = None,
    root: RootOption = None,
) -> None:
    """Evaluate preserved workspaces again, after a repair of the evaluator.

    Verdicts are added and never overwritten; groups that were trained do not change.

    Examples:

      gyre rescore quickstart-20260101-120000 --step 3 --state excluded

      gyre rescore quickstart-20260101-120000 --reason evaluator
    """
    opened_run = opened(run, root)
    try:
        chosen = list(preserved(opened_run, step, state, reason))
    except StorageError as error:
        raise failure(error, "It can't be scored again") from None
    if not chosen:
        raise failure("no preserved execution is like that", "There is nothing to score")
    console = terminal()
    console.print(f"{len(chosen)} executions of run {run}")
    parameters = {
        "run_id": run,
        "root": opened_run.store.url,
        "step": step,
        "state": None if state is None else state.value,
        "reason": reason,
    }
    run_jobs([Job("rescore", opened_run, parameters)], console)
    from flows.rescore import count  # only now: it brings prefect

    counts = count(opened_run, chosen)
    console.print(", ".join(f"{name} {number}" for name, number in counts.items()))
