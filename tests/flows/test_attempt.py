"""Where an attempt begins: the weights that rollouts were made with never change."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading

import pytest

from cells.checkpoint import MANIFEST
from flows.attempt import LostWeightsError, first_undone, has_ended, starting_point, turn
from flows.held_out import HeldOut
from flows.plan import step_plan
from storage.layout import execution_id
from storage.records import (
    CheckpointManifest,
    Evaluation,
    ExecutionOutcome,
    ExecutionResult,
    StepDone,
    StepPlan,
)
from storage.run import Run

FIRST = "policies/first"


def keep_checkpoint(run: Run, version: int, step: int, update: int) -> None:
    key = run.layout.checkpoint(version)
    data = b"weights %d" % version
    run.store.write(f"{key}/policy/model.safetensors", data)
    files = {"policy/model.safetensors": hashlib.sha256(data).hexdigest()}
    manifest = CheckpointManifest(version=version, step=step, update=update, files=files)
    run.store.write_record(f"{key}/{MANIFEST}", manifest)


def finish_step(run: Run, step: int, version: int) -> None:
    done = StepDone(step=step, policy_version=version, seconds=1.0)
    run.store.write_record(run.layout.step_done(step), done)


def end_executions(run: Run, plan: StepPlan) -> None:
    for query in plan.queries:
        for member in range(query.group_size):
            name = execution_id(query.query_id, member)
            result = ExecutionResult(
                execution_id=name,
                query_id=query.query_id,
                outcome=ExecutionOutcome.COMPLETED,
                started_at=0.0,
                ended_at=1.0,
                waited_s=0.0,
                exit_code=0,
                calls=1,
                workspace_key=None,
                detail="",
            )
            run.store.write_record(run.layout.execution_result(name), result)


def test_a_new_run_starts_from_the_first_policy(run_store: Run) -> None:
    start = starting_point(run_store, FIRST)
    assert (start.policy_key, start.version, start.checkpoint) == (FIRST, 0, None)
    assert first_undone(run_store) == (0, 0)


def test_a_killed_first_step_starts_from_the_first_policy_again(run_store: Run) -> None:
    step_plan(run_store, 0, 0)
    assert starting_point(run_store, FIRST).policy_key == FIRST


def test_the_next_step_starts_from_the_newest_checkpoint(run_store: Run) -> None:
    keep_checkpoint(run_store, 2, 0, 2)
    finish_step(run_store, 0, 2)
    start = starting_point(run_store, FIRST)
    assert start.version == 2
    assert start.policy_key.endswith("00000002/policy")
    assert first_undone(run_store) == (1, 2)


@pytest.fixture
def inside_a_step(run_store: Run) -> StepPlan:
    """Step 1 was planned with version 2; a checkpoint in the middle of it holds version 3."""
    keep_checkpoint(run_store, 2, 0, 2)
    finish_step(run_store, 0, 2)
    plan = step_plan(run_store, 1, 2)
    keep_checkpoint(run_store, 3, 1, 1)
    return plan


def test_executions_that_are_left_are_served_with_the_version_of_their_step(
    run_store: Run, inside_a_step: StepPlan
) -> None:
    start = starting_point(run_store, FIRST)
    assert start.version == inside_a_step.policy_version == 2
    assert start.policy_key.endswith("00000002/policy")
    assert start.checkpoint is not None
    assert start.checkpoint.manifest.version == 3


def test_without_executions_left_all_start_from_the_newest(
    run_store: Run, inside_a_step: StepPlan
) -> None:
    end_executions(run_store, inside_a_step)
    assert starting_point(run_store, FIRST).version == 3


def test_a_batch_that_was_begun_ahead_is_served_with_its_own_version(
    run_store: Run, inside_a_step: StepPlan
) -> None:
    """Step 1 has trained an update while the batch of step 2 ran with the version before it."""
    end_executions(run_store, inside_a_step)
    step_plan(run_store, 2, 2)
    start = starting_point(run_store, FIRST)
    assert start.version == 2
    assert start.checkpoint is not None and start.checkpoint.manifest.version == 3


def test_a_version_that_is_still_to_be_served_and_gone_is_said(
    run_store: Run, inside_a_step: StepPlan
) -> None:
    run_store.store.delete(run_store.layout.checkpoint(2))
    with pytest.raises(LostWeightsError, match="executions to run with version 2"):
        starting_point(run_store, FIRST)


def test_what_was_trained_is_never_trained_again_from_an_older_checkpoint(run_store: Run) -> None:
    keep_checkpoint(run_store, 2, 0, 2)
    finish_step(run_store, 0, 2)
    finish_step(run_store, 1, 4)
    with pytest.raises(LostWeightsError, match=r"version 4, the newest whole checkpoint has 2"):
        starting_point(run_store, FIRST)


HOLD = """
import sys
from storage.hold import alone
from storage.objects import Store
with alone(Store(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.timeout(120)
def test_an_attempt_waits_until_the_process_of_another_has_ended(run_store: Run) -> None:
    waits, entered = threading.Event(), threading.Event()

    def second() -> None:
        with turn(run_store, lambda _: waits.set()):
            entered.set()

    command = [sys.executable, "-c", HOLD, run_store.store.url, run_store.layout.turn]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(60)
        assert not entered.is_set()
        first.kill()
        thread.join(60)
    assert entered.is_set()


def test_a_run_has_ended_when_all_is_done_and_nothing_is_kept(run_store: Run) -> None:
    last = run_store.config.training.steps - 1
    assert not has_ended(run_store)
    finish_step(run_store, last, version=4)
    assert not has_ended(run_store)
    held_out = HeldOut.of(run_store, None, None, None)
    result = Evaluation(
        version=4,
        problems=1,
        executions=1,
        excluded=0,
        timed_out=0,
        pass_rate=1.0,
        standard_error=0.0,
        rates={"p0": 1.0},
    )
    run_store.store.write_record(held_out.key(run_store.layout, 4), result)
    assert has_ended(run_store)
    # Daemons of a killed attempt: somebody has to end them.
    run_store.store.write(run_store.layout.host("gateway"), b"{}")
    assert not has_ended(run_store)
