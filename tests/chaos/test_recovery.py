"""Whatever process of a run is killed, the run goes on by itself, and everything is done once.

Prefect, flows, gateway, harnesses, scores, cell hosts and ledgers are real; in the cell hosts
stand-ins take the place of engines and replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.fsck.check import check_run
from storage.layout import execution_id
from storage.records import ExecutionOutcome, ExecutionResult, StepPlan
from storage.run import Run, open_run
from tests.flows.conftest import finish
from tests.flows.orchestrated import (
    LIMIT_S,
    Orchestrated,
    logs,
    marked_processes,
    start_light,
)
from tests.flows.test_killed_run import check_step, stored

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1200)]

SETTINGS = (
    "cells.cells=[{name: a, core: true}, {name: b}]",
    "cells.policy=colocate",
    "training.steps=1",
    # A daemon may take longer to come back than an execution usually takes.
    "rollout.limit_s=600",
)


def begun(site: Orchestrated, name: str) -> Callable[[], bool]:
    """Whether the run's executions ask for replies, none of which is given."""
    return lambda: len(list((site.root / "runs" / name / "executions").glob("*/session.json"))) > 3


def training(site: Orchestrated, name: str) -> Callable[[], bool]:
    """Whether the run's first update is under way."""
    return lambda: stored(site.root / "runs" / name / "steps" / "00000" / "ledger") > 4


MOMENTS = {"rollout": begun, "training": training}

KILLS: dict[str, tuple[tuple[str, ...], str]] = {
    "gateway": (("cells.gateway.server",), "rollout"),
    "execution host": (("tasks.rollout.host",), "rollout"),
    "cell host of a satellite": (("cells.host", "cell-b"), "rollout"),
    "cell host of the core": (("cells.host", "cell-a"), "training"),
    "prefect server": (("prefect", "server", "start"), "rollout"),
}

STOPS: dict[str, tuple[str, ...]] = {
    "gateway": ("cells.gateway.server",),
    "execution host": ("tasks.rollout.host",),
    "cell host of a satellite": ("cells.host", "cell-b"),
    "cell host of the core": ("cells.host", "cell-a"),
    "prefect server": ("prefect", "server", "start"),
    "flow": ("prefect.engine",),
}
STOP_S = 20.0
"""Longer than most single calls may take, shorter than what is borne of a silent daemon."""


def check(run: Run, *, core_lost: bool) -> None:
    """Every execution has one verdict, every micro-step counted once, nothing contradicts."""
    check_step(run, 0, core_lost=core_lost)
    assert [finding for finding in check_run(run) if finding.is_error] == []
    plan = run.store.read_record(run.layout.step_plan(0), StepPlan)
    for query in plan.queries:
        for member in range(query.group_size):
            name = execution_id(query.query_id, member)
            result = run.store.read_record(run.layout.execution_result(name), ExecutionResult)
            assert result.outcome is ExecutionOutcome.COMPLETED, result.detail


@pytest.mark.parametrize("victim", KILLS)
def test_what_is_killed_is_started_again_and_the_run_goes_on(
    orchestrated: Orchestrated, victim: str
) -> None:
    site = orchestrated
    words, moment = KILLS[victim]
    name = victim.replace(" ", "-")
    if moment == "rollout":
        site.hold.touch()
    try:
        train = site.train(name, *SETTINGS)
        site.until(MOMENTS[moment](site, name), moment)
        site.kill(*words)
    finally:
        site.hold.unlink(missing_ok=True)
    site.wait(train, "COMPLETED")
    check(site.run(name), core_lost=moment == "training")
    assert site.left() == []
    told = "\n".join(path.read_text() for path in Path(site.root).glob("*.log"))
    if victim == "prefect server":
        assert "the Prefect server has ended with code -9: started again, 1 of 5 times" in told


@pytest.mark.parametrize("victim", STOPS)
def test_what_stands_still_for_a_while_is_waited_for(
    orchestrated: Orchestrated, victim: str
) -> None:
    site, name = orchestrated, f"stopped-{victim.replace(' ', '-')}"
    train = site.train(name, *SETTINGS)
    site.until(begun(site, name), "rollout")
    with site.stopped(*STOPS[victim]):
        time.sleep(STOP_S)  # what is to be borne
    site.wait(train, "COMPLETED")
    check(site.run(name), core_lost=False)
    assert site.left() == []
    assert site.flow_run(train)["run_count"] == 1, "nothing was lost, nothing begun again"


PROCESSES = {
    "flow": "prefect.engine",
    "worker": "prefect worker start",
    "server": "prefect server start",
}


@pytest.mark.parametrize(
    "victims",
    [("flow",), ("worker",), ("server", "worker"), ("worker", "flow")],
    ids=" and ".join,
)
def test_what_runs_the_flow_is_killed_and_the_flow_is_run_again(
    tmp_path: Path, tiny_policy: Path, victims: tuple[str, ...]
) -> None:
    """By `gyre train` itself, with nobody there to press Retry; also where nobody is left who
    could tell the server of the flow's end."""
    (tmp_path / "evaluators").mkdir()
    command = start_light(
        tmp_path, tiny_policy, "killed", "training.steps=1", "rollout.limit_s=600"
    )
    folder = tmp_path / "runs" / "killed"
    deadline = time.monotonic() + LIMIT_S
    while not len(list(folder.glob("executions/*/session.json"))) > 3:
        assert command.poll() is None and time.monotonic() < deadline, logs(tmp_path)
        time.sleep(0.1)
    running = marked_processes(tmp_path)
    for victim in victims:
        (process,) = [one for one, line in running if PROCESSES[victim] in line]
        process.kill()
    output = finish(command, tmp_path)
    assert command.returncode == 0, f"{output}\n{logs(tmp_path)}"
    assert "it is run again, 1 of 5 times" in output
    if victims == ("worker", "flow"):
        assert "flow run train killed says that it runs, and nobody runs it" in output
    check(open_run(str(tmp_path), "killed"), core_lost=False)
    assert marked_processes(tmp_path) == []
