"""Automations that fire on a real server: a problem set is trained on, its step evaluated, an alarm
pauses it, and a run that falls silent is marked as crashed and gives its cells back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import yaml

from flows.automations import EVALUATE, PAUSE, PROBLEMS, SILENT
from storage.layout import RunLayout
from storage.objects import Store
from storage.run import Run
from tests.flows.operated import Operated
from tests.flows.orchestrated import environment, light, marked_processes

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(3000)]

SET = "fractions"
SILENCE_S = 45.0
"""One and a half heartbeats, so that a test need not wait for the minutes of the product."""


@pytest.fixture(scope="module")
def site(operated: Operated) -> Iterator[Operated]:
    """The server with its automations switched on by the command of the documents, and off again
    as a person does in the UI."""
    words = ["deploy", "--evaluate-steps", "--pause-on-alarm", "--train-on-problems"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *words, "--root", str(operated.root)],
        env=environment(operated.root) | {"PREFECT_API_URL": f"{operated.url}/api"},
        cwd=operated.root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"automation {name}: on" in done.stdout for name in (EVALUATE, PAUSE, PROBLEMS))
    yield operated
    for name in (EVALUATE, PAUSE, PROBLEMS):
        operated.automation(name, enabled=False)


def started(site: Operated, flow: str, **parameters: Any) -> str:
    """Wait for a flow run with these parameters that nobody but an automation has made; its id."""
    found: list[str] = []

    def there() -> bool:
        for one in site.runs_of(flow):
            if parameters.items() <= one["parameters"].items():
                found.append(one["id"])
        return bool(found)

    site.until(there, f"a run of {flow} with {parameters}")
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def trained(site: Operated) -> tuple[str, Run]:
    """A set is put into storage; the flow run of its training, paused by an alarm after step 0."""
    folder = site.root / "problem_sets" / SET
    folder.mkdir(parents=True)
    # The gradient of the stand-in has norm 1: each update is beyond this bound.
    health = {"grad_norm": {"warn": 0.5}}
    config = light(site)
    config["training"] = {"steps": 2, "updates_per_step": 1, "health": health}
    aside = folder / "train.yaml.part"
    aside.write_text(yaml.safe_dump(config))
    aside.rename(folder / "train.yaml")
    flow_run = started(site, "train", config=str(folder / "train.yaml"))
    name = f"run-{flow_run[:8]}"
    done = RunLayout(name).step_done(0)
    site.until(lambda: Store(str(site.root)).exists(done), "step 0")
    site.hold.touch()  # step 1 must not end before the alarm has gone its way
    try:
        site.wait(flow_run, "PAUSED")
    finally:
        site.hold.unlink()
    return flow_run, site.run(name)


def test_a_new_problem_set_is_trained_on(trained: tuple[str, Run]) -> None:
    _, run = trained
    assert run.config.training.steps == 2
    assert run.store.exists(run.layout.step_done(0))


def test_an_alarm_pauses_a_run_which_goes_on_when_it_is_resumed(
    trained: tuple[str, Run], site: Operated
) -> None:
    flow_run, run = trained
    assert not run.store.exists(run.layout.step_done(1))
    site.until(lambda: site.left() == [], "the cells are free")
    site.automation(PAUSE, enabled=False)
    site.resume(flow_run)
    site.wait(flow_run, "COMPLETED")
    assert run.store.exists(run.layout.step_done(1))


def test_a_finished_step_is_evaluated(trained: tuple[str, Run], site: Operated) -> None:
    _, run = trained
    for version in (1, 2):
        evaluation = started(site, "evaluate", run_id=run.run_id, version=version)
        site.wait(evaluation, "COMPLETED")
        assert run.store.exists(run.layout.evaluation(version))


def test_a_silent_run_is_marked_and_its_cells_are_freed(site: Operated) -> None:
    site.automation(SILENT, enabled=True, within=SILENCE_S)
    site.hold.touch()
    try:
        flow_run = site.train("silent", "cells.lease_s=20")
        site.until(lambda: site.steps("silent"), "the first step")
        (stopped,) = [
            process for process, line in marked_processes(site.root) if "prefect.engine" in line
        ]
        stopped.send_signal(signal.SIGSTOP)
        try:
            site.until(lambda: site.state(flow_run) == "CRASHED", "the run is marked")
            silent = {stopped.pid}
            site.until(lambda: _others(site, silent) == [], "the cells are free")
        finally:
            with suppress(psutil.NoSuchProcess):
                os.kill(stopped.pid, signal.SIGKILL)
    finally:
        site.hold.unlink()
        site.automation(SILENT, enabled=True, within=300.0)
    assert "no heartbeat" in site.flow_run(flow_run)["state"]["message"]


def _others(site: Operated, pids: set[int]) -> list[str]:
    """Daemons and harnesses, without the flow that was stopped."""
    left = [line for process, line in marked_processes(site.root) if process.pid not in pids]
    return [line for line in left if line in site.left()]
