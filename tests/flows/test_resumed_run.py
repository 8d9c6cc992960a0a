"""A flow that is killed in mid-step, and evaluators that fail: the run is finished all the same."""

from __future__ import annotations

import signal
import time

import orjson
import pytest

from flows.history import updates_of
from flows.plan import step_plan
from storage.layout import execution_id
from storage.records import ExecutionResult, Scored
from storage.run import Run, open_run
from tasks.scoring.verdicts import newest_verdict
from tasks.warm_start.build import policy_key
from tests.flows.conftest import (
    FinishedRun,
    finish,
    logs,
    marked_processes,
    start_gyre,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

WAIT_S = 600


def results(run: Run) -> dict[str, ExecutionResult]:
    found = {}
    for query in step_plan(run, 0, 0).queries:
        for member in range(query.group_size):
            name = execution_id(query.query_id, member)
            key = run.layout.execution_result(name)
            if run.store.exists(key):
                found[name] = run.store.read_record(key, ExecutionResult)
    return found


@pytest.fixture(scope="module")
def killed_and_resumed(
    smoke_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, dict[str, ExecutionResult], int]:
    """The run, what it had done when its flow was killed, and the gateway's process then."""
    root = tmp_path_factory.mktemp("resumed")
    # A local HF directory as the policy: the one that the warm start of the other run has made.
    policy = smoke_run.run.store.local_path(policy_key(smoke_run.run.config))
    first = start_gyre(
        root, "train", "--config", "smoke", "--name", "r", "--set", "training.steps=1",
        "--set", "model.source=hf_directory", "--set", f"model.path={policy}",
        "--set", "evaluation.before=false", "--set", "debug.evaluator_failure_share=0.2",
    )  # fmt: skip
    deadline = time.monotonic() + WAIT_S
    plan = root / "runs/r/steps/00000/plan.json"
    while not plan.exists() or not results(open_run(str(root), "r")):
        assert first.poll() is None, f"{first.communicate()[0]}\n{logs(root)}"
        assert time.monotonic() < deadline, logs(root)
        time.sleep(0.1)
    for process, line in marked_processes(root):
        if "prefect.engine" in line:
            process.send_signal(signal.SIGKILL)
    first.kill()  # it would have the flow run again
    finish(first, root)
    run = open_run(str(root), "r")
    before = results(run)
    gateway = orjson.loads(run.store.read(run.layout.host("gateway")))["pid"]
    second = start_gyre(root, "train", "--resume", "r")
    output = finish(second, root)
    assert second.returncode == 0, f"{output[-4000:]}\n{logs(root)}"
    assert [line for _, line in marked_processes(root)] == []
    return run, before, gateway


def test_what_was_done_is_not_done_again(
    killed_and_resumed: tuple[Run, dict[str, ExecutionResult], int],
) -> None:
    run, before, _ = killed_and_resumed
    after = results(run)
    assert before
    assert {name: after[name] for name in before} == before


def test_the_daemons_are_adopted(
    killed_and_resumed: tuple[Run, dict[str, ExecutionResult], int],
) -> None:
    run, _, gateway = killed_and_resumed
    assert orjson.loads(run.store.read(run.layout.manifest))["gateway"]["pid"] == gateway


def test_every_execution_has_one_verdict_and_every_update_one_line(
    killed_and_resumed: tuple[Run, dict[str, ExecutionResult], int],
) -> None:
    run, _, _ = killed_and_resumed
    names = [
        execution_id(query.query_id, member)
        for query in step_plan(run, 0, 0).queries
        for member in range(query.group_size)
    ]
    for name in names:
        assert len(run.store.children(run.layout.verdicts(name))) <= 1
    updates = updates_of(run)
    assert [(line.step, line.update) for line in updates] == [(0, 0), (0, 1)]
    assert sum(line.valid + line.excluded for line in updates) == len(names)
    # An evaluator that failed for good is an exclusion, never a reward of zero.
    verdicts = [newest_verdict(run.store, run.layout, name) for name in names]
    scored = [found for found in verdicts if found and isinstance(found.verdict, Scored)]
    assert sum(line.excluded for line in updates) == len(names) - len(scored)
