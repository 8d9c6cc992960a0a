"""Flow ``evaluate``: the held-out pass rate of a weight version."""

from __future__ import annotations

from statistics import fmean
from typing import Annotated

from prefect import flow, get_run_logger
from prefect.futures import wait
from pydantic import Field

from cells.board import Board
from cells.checkpoint import find_checkpoint, latest_checkpoint
from cells.client import DaemonClient, DaemonError
from cells.epoch import take_epoch
from cells.progress import ended_when_silent
from cells.task import manage_cells
from flows.doctor.preflight import preflight
from flows.estimates import standard_error
from flows.held_out import HeldOut
from flows.hosts import cell_daemon, find_hosts, hosts_of, kept_hosts
from flows.progress import evaluation_bar
from flows.rollouts import in_batches, living, roll_out, runner_for
from flows.warm_start import warm_start
from storage.hold import hold_run
from storage.layout import execution_id
from storage.objects import MissingObjectError
from storage.records import Evaluation, QueryPlan, Scored
from storage.run import Run, open_run
from tasks.sampling.guard import TooManyExcludedError
from tasks.scoring.verdicts import newest_verdict

BATCH = 16
"""Executions of a task, about: few enough that evaluations begin early."""


class RunBusyError(RuntimeError):
    """The run's daemons live and hold other weights than those that are to be evaluated."""


@flow(name="evaluate", flow_run_name="{run_id} evaluation", persist_result=True)
def evaluate(
    root: str,
    run_id: str,
    version: int | None = None,
    problems: Annotated[int, Field(ge=1, le=100_000)] | None = None,
    samples: Annotated[int, Field(ge=1, le=1024)] | None = None,
    seed: int | None = None,
) -> str:
    """Evaluate a checkpointed version (the newest when left out) on the held-out problems.

    Starts the daemons of the run and ends them again. Returns the key of the evaluation.

    Args:
        root: folder or URL of the storage.
        run_id: name of the run.
        version: a checkpointed weight version; empty takes the newest.
        problems: how many, instead of the run's `evaluation.problems`.
        samples: executions of each, instead of `evaluation.samples`.
        seed: of the problems, instead of `evaluation.seed`.
    """
    run = open_run(root, run_id)
    say = get_run_logger().info
    held_out = HeldOut.of(run, problems, samples, seed)
    if version is not None and run.store.exists(held_out.key(run.layout, version)):
        return held_out.key(run.layout, version)
    preflight(run.config, root, run_id)
    hold_run(run.store, run.layout)
    checkpoint = latest_checkpoint(run) if version is None else find_checkpoint(run, version)
    if checkpoint is not None:
        policy, number = checkpoint.policy_key, checkpoint.manifest.version
    elif not version:
        policy, number = warm_start(root, run_id), 0
    else:
        raise MissingObjectError(f"run {run_id} has no checkpoint of version {version}")
    _refuse_other_weights(run, number)
    with hosts_of(run, policy, number, say):
        return evaluate_serving(root, run_id, number, held_out)


def evaluate_serving(root: str, run_id: str, version: int, held_out: HeldOut | None = None) -> str:
    """Evaluate ``version`` on daemons that run already; found again when it was done before.

    Args:
        held_out: the run's own held-out problems when left out.
    """
    run = open_run(root, run_id)
    chosen = held_out or HeldOut.of(run, None, None, None)
    key = chosen.key(run.layout, version)
    if run.store.exists(key):
        return key
    runner = runner_for(-(-chosen.problems * chosen.samples // BATCH))
    _roll_out_held_out.with_options(task_runner=runner)(
        root, run_id, version, chosen.problems, chosen.samples, chosen.seed
    )
    return key


# Prefect tells the calls of a flow inside another one apart by their number only. A retry of the
# outer flow, which leaves out what is evaluated already, would be given the run of another version
# as its own, were there a result of it to be had.
@flow(name="evaluation", flow_run_name="{run_id} evaluate v{version}", persist_result=False)
def _roll_out_held_out(
    root: str, run_id: str, version: int, problems: int, samples: int, seed: int
) -> None:
    run = open_run(root, run_id)
    held_out = HeldOut.of(run, problems, samples, seed)
    hosts = kept_hosts(run) or find_hosts(run)
    queries = held_out.queries(run, version)
    board = Board(live=living(run, queries), serve_version=version)
    epoch = take_epoch(run.store, run.layout)
    manager = manage_cells.submit(root, run_id, -1, epoch, board, hosts.cells, hosts.gateway)
    try:
        board.wait_serving(run.config.cells.switch_limit_s)
        temperature = run.config.evaluation.temperature
        batches = in_batches(queries, BATCH)
        limit_s = run.config.cells.progress_limit_s
        with (
            evaluation_bar(run, version, queries, board),
            ended_when_silent(board.progress, limit_s, board.fail),
        ):
            scored = roll_out(run, root, hosts, board, batches, version, temperature)
            wait([score for _, score in scored if score is not None])
            board.check()
    finally:
        board.stop()
        manager.wait()
    result = summarise(run, version, queries, held_out)
    run.store.write_record(held_out.key(run.layout, version), result)
    get_run_logger().info(
        "version %d: pass rate %.3f, standard error %.3f, over %d problems",
        version,
        result.pass_rate,
        result.standard_error,
        result.problems,
    )


def summarise(
    run: Run, version: int, queries: tuple[QueryPlan, ...], held_out: HeldOut
) -> Evaluation:
    """Mean reward over problems, each problem the mean of its valid executions.

    The standard error is that of the mean over problems, so executions of one problem do not
    count as independent.

    Raises:
        TooManyExcludedError: too many executions have no verdict for a figure to mean anything.
    """
    rewards: dict[str, tuple[float, ...]] = {}
    excluded = timed_out = valid = 0
    for query in queries:
        verdicts = []
        for member in range(query.group_size):
            record = newest_verdict(run.store, run.layout, execution_id(query.query_id, member))
            if record is not None and isinstance(record.verdict, Scored):
                verdicts.append(record.verdict)
        excluded += query.group_size - len(verdicts)
        timed_out += sum(verdict.timed_out for verdict in verdicts)
        valid += len(verdicts)
        if verdicts:
            rewards[query.problem_id] = tuple(verdict.reward for verdict in verdicts)
    rates = {problem: fmean(own) for problem, own in rewards.items()}
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
        samples=held_out.samples,
        seed=held_out.seed,
        rewards=rewards,
    )


def _refuse_other_weights(run: Run, version: int) -> None:
    """A run under way, or killed a moment ago, has daemons that would be adopted with what they
    serve."""
    for cell in run.config.cells.cells:
        try:
            client = DaemonClient.find(run.store, run.layout, cell_daemon(cell.name))
            held = int(client.call("GET", "/status")["replica"]["version"])
        except DaemonError:
            continue
        if held != version:
            raise RunBusyError(
                f"run {run.run_id} has living daemons that hold version {held}, not {version}: it "
                f"is under way, or was killed less than cells.lease_s "
                f"({run.config.cells.lease_s:g} s) ago. Wait for its end and evaluate again"
            )
