"""The first step of a run, given to runs that differ from it only in what is done with rollouts."""

from __future__ import annotations

from storage.layout import execution_id
from storage.objects import StorageError
from storage.records import (
    Evaluation,
    ExecutionOutcome,
    Record,
    StepDone,
    StepPlan,
    VerdictRecord,
)
from storage.run import Run
from tasks.rollout.group import find_result
from tasks.warm_start.policies import first_policy, remember_policy


class SharedStep(Record):
    """Beside the plan of a first step whose rollouts and verdicts another run has made."""

    source: str
    """The run that made them."""
    executions: int
    evaluation: bool
    """Whether the evaluation of the first policy is that run's too."""


def shared_key(run: Run) -> str:
    """Where a run records that its first step's rollouts are another run's."""
    return f"{run.layout.step(0)}/shared.json"


def find_shared(run: Run) -> SharedStep | None:
    """Whose rollouts the first step of a run trains; None where they are its own."""
    key = shared_key(run)
    return run.store.read_record(key, SharedStep) if run.store.exists(key) else None


def check_source(source: Run) -> None:
    """Raises:
    StorageError: its first step is not done, or its rollouts are gone.
    """
    for key in (source.layout.step_plan(0), source.layout.step_done(0)):
        if not source.store.exists(key):
            raise StorageError(
                f"run {source.run_id} can't give its first step away: {key} is not there. Let the "
                f"run finish a step first"
            )
    source.store.read_record(source.layout.step_done(0), StepDone)


def share_first_step(source: Run, target: Run) -> None:
    """Copy what the first step's samples are built from: plan, calls, results, verdicts that were
    there in time, and the first policy. Both runs lie in one storage; frozen workspaces are not
    copied, the results name the source's.

    Done when the record ``SharedStep`` is there, which is written last.
    """
    if find_shared(target) is not None:
        return
    store = target.store
    plan = source.store.read_record(source.layout.step_plan(0), StepPlan)
    count = 0
    for query in plan.queries:
        for member in range(query.group_size):
            count += _copy(source, target, execution_id(query.query_id, member))
    if policy := first_policy(source):
        remember_policy(target, policy)
    evaluation = _copy_evaluation(source, target)
    store.write_record_once(target.layout.step_plan(0), plan)
    store.write_record_once(
        shared_key(target),
        SharedStep(source=source.run_id, executions=count, evaluation=evaluation),
    )


def _copy(source: Run, target: Run, execution: str) -> bool:
    """False for an execution that failed on our side: the target runs it itself."""
    result = find_result(source, execution)
    if result is None or result.outcome is ExecutionOutcome.HOST_FAILED:
        return False
    store = target.store
    for prefix in (source.layout.calls(execution), source.layout.turns(execution)):
        for key in source.store.keys(prefix):
            store.write(_moved(source, target, key), source.store.read(key))
    folder = source.layout.verdicts(execution)
    for name in source.store.children(folder):
        verdict = source.store.read_record(f"{folder}/{name}", VerdictRecord)
        if not verdict.late:
            store.write_record(f"{target.layout.verdicts(execution)}/{name}", verdict)
    # Last: an execution with a result has ended.
    store.write_record(target.layout.execution_result(execution), result)
    return True


def _copy_evaluation(source: Run, target: Run) -> bool:
    key = source.layout.evaluation(0)
    if source.config.evaluation != target.config.evaluation or not source.store.exists(key):
        return False
    evaluation = source.store.read_record(key, Evaluation)
    target.store.write_record(target.layout.evaluation(0), evaluation)
    return True


def _moved(source: Run, target: Run, key: str) -> str:
    return target.layout.prefix + key.removeprefix(source.layout.prefix)
