"""Flow ``evaluate``: the held-out pass rate of a weight version."""

from __future__ import annotations

from statistics import fmean, stdev

from prefect import flow, get_run_logger
from prefect.futures import wait

from cells.board import Board
from cells.checkpoint import find_checkpoint, latest_checkpoint
from cells.epoch import take_epoch
from cells.task import manage_cells
from flows.hosts import find_hosts, hosts_of
from flows.plan import evaluation_queries
from flows.rollouts import in_batches, living, roll_out, runner_for
from flows.warm_start import warm_start
from storage.layout import execution_id
from storage.objects import MissingObjectError
from storage.records import Evaluation, QueryPlan, Scored
from storage.run import Run, open_run
from tasks.sampling.guard import TooManyExcludedError
from tasks.scoring.verdicts import newest_verdict

BATCH = 16
"""Executions of a task, about: few enough that evaluations begin early."""


@flow(name="evaluate", flow_run_name="{run_id} evaluation", persist_result=True)
def evaluate(root: str, run_id: str, version: int | None = None) -> str:
    """Evaluate a checkpointed version (the newest when left out) on the held-out problems.

    Starts the daemons of the run and ends them again. Returns the key of the evaluation.
    """
    run = open_run(root, run_id)
    say = get_run_logger().info
    if version is not None and run.store.exists(run.layout.evaluation(version)):
        return run.layout.evaluation(version)
    checkpoint = latest_checkpoint(run) if version is None else find_checkpoint(run, version)
    if checkpoint is not None:
        policy, number = checkpoint.policy_key, checkpoint.manifest.version
    elif not version:
        policy, number = warm_start(root, run_id), 0
    else:
        raise MissingObjectError(f"run {run_id} has no checkpoint of version {version}")
    with hosts_of(run, policy, number, say):
        return evaluate_serving(root, run_id, number)


def evaluate_serving(root: str, run_id: str, version: int) -> str:
    """Evaluate ``version`` on daemons that run already; found again when it was done before."""
    run = open_run(root, run_id)
    key = run.layout.evaluation(version)
    if run.store.exists(key):
        return key
    queries = evaluation_queries(run, version)
    runner = runner_for(len(in_batches(queries, BATCH)))
    _roll_out_held_out.with_options(task_runner=runner)(root, run_id, version)
    return key


@flow(name="evaluation", flow_run_name="{run_id} evaluate v{version}")
def _roll_out_held_out(root: str, run_id: str, version: int) -> None:
    run = open_run(root, run_id)
    hosts = find_hosts(run)
    queries = evaluation_queries(run, version)
    board = Board(live=living(run, queries), serve_version=version)
    epoch = take_epoch(run.store, run.layout)
    manager = manage_cells.submit(root, run_id, -1, epoch, board, hosts.cells, hosts.gateway)
    try:
        board.wait_serving(run.config.cells.switch_limit_s)
        temperature = run.config.evaluation.temperature
        batches = in_batches(queries, BATCH)
        scored = roll_out(run, root, hosts, board, batches, version, temperature)
        wait([score for _, score in scored])
    finally:
        board.stop()
        manager.wait()
    result = summarise(run, version, queries)
    run.store.write_record(run.layout.evaluation(version), result)
    get_run_logger().info(
        "version %d: pass rate %.3f, standard error %.3f, over %d problems",
        version,
        result.pass_rate,
        result.standard_error,
        result.problems,
    )


def summarise(run: Run, version: int, queries: tuple[QueryPlan, ...]) -> Evaluation:
    """Mean reward over problems, each problem the mean of its valid executions.

    The standard error is that of the mean over problems, so executions of one problem do not
    count as independent.

    Raises:
        TooManyExcludedError: too many executions have no verdict for a figure to mean anything.
    """
    rates: dict[str, float] = {}
    excluded = timed_out = valid = 0
    for query in queries:
        rewards = []
        for member in range(query.group_size):
            execution = execution_id(query.query_id, member)
            record = newest_verdict(run.store, run.layout, execution)
            if record is None or not isinstance(record.verdict, Scored):
                excluded += 1
                continue
            rewards.append(record.verdict.reward)
            timed_out += record.verdict.timed_out
        valid += len(rewards)
        if rewards:
            rates[query.problem_id] = fmean(rewards)
    values = list(rates.values())
    if not values or excluded > run.config.scoring.max_excluded_share * (valid + excluded):
        raise TooManyExcludedError(
            f"{excluded} of {valid + excluded} held-out executions have no verdict, more than "
            f"scoring.max_excluded_share ({run.config.scoring.max_excluded_share:g}) allows: mend "
            f"the evaluator and run the evaluation again"
        )
    return Evaluation(
        version=version,
        problems=len(values),
        executions=valid,
        excluded=excluded,
        timed_out=timed_out,
        pass_rate=fmean(values),
        standard_error=standard_error(values),
        rates=rates,
    )


def standard_error(values: list[float]) -> float:
    """Of the mean of independent values; 0 for fewer than two."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
