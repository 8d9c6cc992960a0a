"""Pausing a run between two steps: its cells are free until it is resumed."""

from __future__ import annotations

from prefect.flow_runs import suspend_flow_run
from prefect.runtime import deployment

from storage.run import Run


def pause_key(run: Run) -> str:
    """While it is there, the run stops after the step under way."""
    return f"{run.layout.prefix}/pause"


def ask_pause(run: Run) -> None:
    """Have a run stop after its step. Asked twice, it is the same."""
    run.store.write(pause_key(run), b"")


def forget_pause(run: Run) -> bool:
    """Take that back; whether it had been asked."""
    asked = run.store.exists(pause_key(run))
    run.store.delete(pause_key(run))
    return asked


def pause_if_asked(run: Run) -> None:
    """Between steps: suspend the flow run that this is called in, where it was asked.

    Its process ends and gives the cells back. `Resume` in the Prefect UI has a worker go on after
    the last step.

    Raises:
        Pause: to end the flow's process; no failure.
    """
    # A flow run without a deployment could not be started again by a worker.
    if run.store.exists(pause_key(run)) and deployment.id is not None:
        forget_pause(run)
        suspend_flow_run()
