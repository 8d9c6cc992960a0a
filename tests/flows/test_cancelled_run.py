"""A run is started from the form and cancelled by the button in the Prefect UI, others by the API:
they end their harnesses and daemons themselves, and can be gone on with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from storage.journal import read_lines
from tests.flows.browser import UI_LIMIT_MS, browser_page, picture, press, start_from_form
from tests.flows.orchestrated import Orchestrated, light

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


def watch(site: Orchestrated, page: Page, flow_run: str, state: str) -> None:
    """Open the page of a flow run, which shows its state."""
    page.goto(f"{site.url}/runs/flow-run/{flow_run}", wait_until="domcontentloaded")
    expect(page.get_by_text(state, exact=True).first).to_be_visible(timeout=UI_LIMIT_MS)
    picture(page, state.lower())


def test_start_watch_and_cancel_in_the_browser_and_go_on(orchestrated: Orchestrated) -> None:
    site, name = orchestrated, "stopped"
    site.hold.touch()
    try:
        with browser_page() as page:
            train = start_from_form(site, page, name, light(site))
            site.until(lambda: site.steps(name), "the first step")
            watch(site, page, train, "Running")
            press(site, page, train, "Cancel", "Confirm")
            site.wait(train, "CANCELLED")
            watch(site, page, train, "Cancelled")
    finally:
        site.hold.unlink()
    check_released(site, name)
    run = site.run(name)
    assert run.store.exists(run.layout.manifest)
    assert run.config.training.steps == 1, "as the form said"
    assert run.config.harness.turns == 2, "as the file said"
    resumed = site.start("train", run_id=name, root=str(site.root))
    site.wait(resumed, "COMPLETED")
    updates = run.config.training.updates_per_step
    assert len(read_lines(run.store, run.layout.metrics)) == updates


@pytest.mark.long
@pytest.mark.parametrize("moment", [daemons_start, harnesses_wait])
def test_cancel_is_over_in_time(orchestrated: Orchestrated, moment: Callable[[Path], bool]) -> None:
    name = f"cancelled-{moment.__name__.replace('_', '-')}"
    assert cancel(orchestrated, name, moment) < LIMIT_S
    check_released(orchestrated, name)
