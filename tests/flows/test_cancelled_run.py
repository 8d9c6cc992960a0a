"""A cancelled run ends its harnesses and daemons itself, and can be gone on with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.journal import read_lines
from tests.flows.orchestrated import Orchestrated

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]

EXECUTIONS = 16
LIMIT_S = 15.0
"""From the request to cancel to the state Cancelled, on a machine that does nothing else."""


def daemons_start(run: Path) -> bool:
    return (run / "logs" / "gateway.log").exists()


def harnesses_wait(run: Path) -> bool:
    """Every harness has asked the model, which does not answer."""
    return len(list(run.glob("executions/*/session.json"))) == EXECUTIONS


def cancel(site: Orchestrated, name: str, moment: Callable[[Path], bool]) -> float:
    """Cancel a new run at a moment of it; seconds until it was cancelled."""
    site.hold.touch()
    try:
        train = site.train(name, "training.steps=1")
        site.until(lambda: moment(site.root / "runs" / name), "the moment to cancel")
        began = time.monotonic()
        site.cancel(train)
        site.wait(train, "CANCELLED")
        return time.monotonic() - began
    finally:
        site.hold.unlink()


def check_released(site: Orchestrated, name: str) -> None:
    """Prefect kills a flow that does not end in time. Such a one leaves all of this behind."""
    run = site.run(name)
    assert site.left() == []
    assert run.store.children(run.layout.hosts) == []
    tasks = [task for one in site.steps(name) for task in site.tasks(one["id"])]
    assert [task for task, state in tasks if state in ("Running", "Pending")] == []


def test_cancel_and_go_on(orchestrated: Orchestrated) -> None:
    name = "cancelled"
    seconds = cancel(orchestrated, name, harnesses_wait)
    print(f"cancelled in {seconds:.1f} s")
    check_released(orchestrated, name)
    run = orchestrated.run(name)
    assert run.store.exists(run.layout.manifest)
    resumed = orchestrated.start("train", run_id=name, root=str(orchestrated.root))
    orchestrated.wait(resumed, "COMPLETED")
    updates = run.config.training.updates_per_step
    assert len(read_lines(run.store, run.layout.metrics)) == updates


@pytest.mark.long
@pytest.mark.parametrize("moment", [daemons_start, harnesses_wait])
def test_cancel_is_over_in_time(orchestrated: Orchestrated, moment: Callable[[Path], bool]) -> None:
    name = f"cancelled-{moment.__name__.replace('_', '-')}"
    assert cancel(orchestrated, name, moment) < LIMIT_S
    check_released(orchestrated, name)
