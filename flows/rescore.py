"""Flow ``rescore``: evaluate preserved workspaces again, after a repair of the evaluator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import wait
from prefect.runtime import task_run

from flows.rollouts import runner_for
from storage.hold import hold_run
from storage.run import Run, open_run
from tasks.problems.source import EvaluatorError
from tasks.scoring.rescoring import Preserved, VerdictState, preserved, rescore, reward_of
from tasks.scoring.task import evaluators
from tasks.scoring.verdicts import newest_verdict, read_verdict

_AT_ONCE = 4
"""Groups, about; evaluations are as many as ``scoring.parallel`` allows."""


class NothingToScoreError(ValueError):
    """No execution of the run is meant."""


@task(name="rescore_group", task_run_name="rescore {query}", cache_policy=NO_CACHE)
def rescore_group(root: str, run_id: str, query: str, chosen: tuple[Preserved, ...]) -> None:
    """Evaluate a group's executions again. A retry evaluates only what has no new score yet.

    Raises:
        EvaluatorError: our side failed for some.
    """
    run = open_run(root, run_id)
    attempt = task_run.run_count - 1
    last = attempt >= run.config.scoring.retries

    def evaluate(one: Preserved) -> str:
        try:
            with evaluators(run.config.scoring.parallel):
                rescore(run, one, attempt, last=last)
        except EvaluatorError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(run.config.scoring.parallel) as pool:
        failures = [text for text in pool.map(evaluate, chosen) if text]
    if failures:
        raise EvaluatorError(f"{len(failures)} of {len(chosen)} failed, the first: {failures[0]}")


@flow(
    name="rescore",
    flow_run_name="rescore {run_id}",
    persist_result=True,
    task_runner=runner_for(_AT_ONCE),
)
def rescore_run(
    root: str,
    run_id: str,
    step: int | None = None,
    state: VerdictState | None = None,
    reason: str | None = None,
) -> dict[str, int]:
    """Evaluate the preserved workspaces of a run's training executions again.

    Verdicts are added with the next number, never overwritten. Groups that are sealed do not
    change; a verdict that comes after is kept and marked late. A step that stopped because too much
    was excluded goes on with the new verdicts when its run is resumed.

    Args:
        root: folder or URL of the storage.
        run_id: name of the run.
        step: only executions of this step.
        state: only those whose newest verdict is `scored`, `excluded` or `timed_out`.
        reason: only those excluded for this reason, for example `evaluator`.

    Returns:
        How many were evaluated, changed, and failed again.

    Raises:
        NothingToScoreError: none is meant.
    """
    run = open_run(root, run_id)
    hold_run(run.store, run.layout)
    chosen = list(preserved(run, step, state, reason))
    if not chosen:
        raise NothingToScoreError(f"run {run_id}: no preserved execution is like that")
    scoring = run.config.scoring
    again = rescore_group.with_options(
        retries=scoring.retries,
        retry_delay_seconds=[scoring.retry_delay_s * 2**tries for tries in range(scoring.retries)],
    )
    groups = [
        (query, tuple(group)) for query, group in groupby(chosen, lambda one: one.query.query_id)
    ]
    wait([again.submit(root, run_id, query, group) for query, group in groups])
    counts = count(run, chosen)
    get_run_logger().info("%s", ", ".join(f"{name} {count}" for name, count in counts.items()))
    return counts


def count(run: Run, chosen: list[Preserved]) -> dict[str, int]:
    """How many of those that were chosen before have been evaluated, changed, and failed since."""
    counts = {"evaluated": 0, "changed": 0, "late": 0, "failed": 0}
    for one in chosen:
        after = newest_verdict(run.store, run.layout, one.execution)
        if after is None or after.version <= one.version or reward_of(after) is None:
            counts["failed"] += 1
            continue
        before = read_verdict(run.store, run.layout, one.execution, one.version)
        counts["evaluated"] += 1
        counts["changed"] += reward_of(before) != reward_of(after)
        counts["late"] += after.late
    return counts
