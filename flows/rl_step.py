"""Flow ``rl_step``: launch rollouts, score, build samples, train, while cells move."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

from httpx import HTTPError
from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow_sync
from prefect.futures import PrefectFuture, wait
from prefect.states import Cancelled, Pending
from prefect.utilities.annotations import allow_failure

from cells.board import Board
from cells.checkpoint import (
    CheckpointError,
    checkpoint_versions,
    prune_checkpoints,
    save_checkpoint,
)
from cells.client import DaemonClient, DaemonError
from cells.epoch import take_epoch
from cells.progress import ended_when_silent
from cells.scheduler import Adaptive
from cells.task import manage_cells, policy_of
from cells.wanted import want_newer
from configs.training import StaleKind
from flows.attempt import attempt, first_undone, turn
from flows.carrying import CarriedRollouts
from flows.hosts import Hosts, kept_elsewhere, kept_hosts
from flows.plan import step_plan
from flows.progress import step_bar
from flows.rollouts import living, roll_out
from flows.roots import absolute_root
from storage.objects import StorageError
from storage.records import Excluded, GroupHeader, StepDone, StepPlan
from storage.run import Run, open_run
from storage.samples import read_group
from tasks.sampling.guard import ExclusionGuard
from tasks.sampling.task import build_samples
from tasks.training.feed import GroupFeed
from tasks.training.shuffle import counted_together
from tasks.training.task import train_stream

DEPLOYMENT = "rl_step/rl_step"
_NOT_YET = timedelta(hours=1)
"""A run that is made for then is run at once by its maker. Should that die in between, a worker
gets it, which does no harm: a step that is done is not run again."""

_CANCEL_PATIENCE_S = 3.0


class StepOrderError(RuntimeError):
    """A step was asked for whose turn it is not."""


@flow(name="rl_step", flow_run_name="{run_id} step {step}", persist_result=True)
def rl_step(root: str, run_id: str, step: int) -> int:
    """Run one step and return the version that it ends with.

    A step that is done already returns at once; an unfinished one goes on from what is stored.
    Inside a `train` it uses the processes that this keeps. On its own, as after a retry in the UI,
    it starts them and ends them again; while a `train` of the same run is under way elsewhere, it
    waits for that to do the step.

    Args:
        root: folder or URL of the storage.
        run_id: name of the run.
        step: its number. Those before it are done.

    Raises:
        StepOrderError: a step before it is not done.
    """
    root = absolute_root(root)
    run = open_run(root, run_id)
    hosts = kept_hosts(run)
    if hosts is not None:
        return _run(run, root, hosts, step)
    version = _done_elsewhere(run, step)
    if version is not None:
        return version
    with turn(run, get_run_logger().info):
        due, _ = first_undone(run)
        if due < step:
            raise StepOrderError(f"run {run.run_id}: the step to run is {due}, not {step}")
        if due > step:
            return cast(int, version_after(run, step))
        with attempt(root, run) as own:
            return _run(run, root, own, step)


def run_step(root: str, run_id: str, step: int) -> int:
    """Run a step inside the flow that calls this, and return the version that it ends with.

    It is a run of the step's deployment, where there is one: Prefect offers to retry only these.
    """
    parameters: dict[str, Any] = {"root": root, "run_id": run_id, "step": step}
    try:
        made = cast(  # a coroutine only inside an event loop
            FlowRun,
            run_deployment(
                DEPLOYMENT,
                parameters=parameters,
                flow_run_name=f"{run_id} step {step}",
                scheduled_time=datetime.now(UTC) + _NOT_YET,
                timeout=0,
            ),
        )
    except ObjectNotFound:
        return cast(int, rl_step(**parameters))
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(made.id, Pending(), force=True)
        child = client.read_flow_run(made.id)
    try:
        return cast(int, run_flow_sync(rl_step, flow_run=child, parameters=parameters))
    finally:
        _give_up_unbegun(made.id)


def _give_up_unbegun(flow_run_id: UUID) -> None:
    """End the run of a step that never began: its caller was paused or cancelled just before.

    As long as it waits it holds its queue's only place, and nothing else would be started.
    """
    with suppress(HTTPError), get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
        if state is not None and state.is_pending():
            client.set_flow_run_state(flow_run_id, Cancelled(message="it never began"), force=True)


def version_after(run: Run, step: int) -> int | None:
    """The version that a step ended with; None when it is not done."""
    key = run.layout.step_done(step)
    if not run.store.exists(key):
        return None
    return run.store.read_record(key, StepDone).policy_version


def _done_elsewhere(run: Run, step: int) -> int | None:
    """Wait while another process works on the run. The step's version, when it is done."""
    say = get_run_logger().info
    while (version := version_after(run, step)) is None and kept_elsewhere(run):
        say("another flow works on run %s: waiting for step %d, or its end", run.run_id, step)
    return version


def _run(run: Run, root: str, hosts: Hosts, step: int) -> int:
    """Launch, score, build and train what is left of a step, and record that it is done."""
    done = version_after(run, step)
    if done is not None:
        return done
    began = time.monotonic()
    core = hosts.cells[hosts.core]
    core_version = hosts.core_version()
    plan = step_plan(run, step, core_version)
    epoch = take_epoch(run.store, run.layout)
    ahead = _ahead(run, plan, core_version)
    policy = policy_of(run.config)
    carries = isinstance(policy, Adaptive)
    board = Board(
        # Where groups may outlive their step, who launches them says what lives.
        live=() if carries else living(run, plan.queries),
        serve_version=durable_version(run) if carries else plan.policy_version,
        expected=len(plan.queries),
        newer=carries,
    )
    feed = GroupFeed()
    carried: tuple[str, ...] = ()
    manager = manage_cells.submit(root, run.run_id, step, epoch, board, hosts.cells, hosts.gateway)
    groups = len(plan.queries)
    trainer = train_stream.submit(
        root, run.run_id, step, groups, epoch, board, feed, hosts.cells, hosts.core
    )
    try:
        limit_s = run.config.cells.progress_limit_s
        with (
            step_bar(run, step, plan.queries, board),
            ended_when_silent(board.progress, limit_s, board.fail),
        ):
            if isinstance(policy, Adaptive):
                rollouts = CarriedRollouts(run, root, hosts, board, feed, plan, policy)
                rollouts.run(trainer)
                carried = rollouts.carried()
            else:
                board.wait_serving(run.config.cells.switch_limit_s)
                _roll_out_and_build(run, root, hosts, board, plan, feed)
                feed.close()
            if ahead is not None:
                board.launch(living(run, ahead.queries), ahead.policy_version)
                board.wait_serving(run.config.cells.switch_limit_s)
                _roll_out_and_build(run, root, hosts, board, ahead, GroupFeed())
            version = trainer.result()
            checkpoint = save_checkpoint(
                run, core, epoch=epoch, step=step, update=run.config.training.updates_per_step
            )
            if not carried:
                # The next step begins with cells that serve; one that is late then comes in it.
                board.wait_settled(run.config.cells.switch_limit_s)
    except Exception as error:
        feed.fail(error)
        _end(board, manager, trainer)
        _keep_updates(run, core, epoch, step)
        raise
    except BaseException as error:
        feed.fail(error)
        _cut_short(hosts, board, manager, trainer)
        raise
    finally:
        _end(board, manager, trainer)
    seconds = time.monotonic() - began
    record = StepDone(step=step, policy_version=version, seconds=seconds, carried=carried)
    run.store.write_record_once(run.layout.step_done(step), record)
    want_newer(run, checkpoint.policy_key, version)
    # Only now: until it is done, the step may need the version that it was planned with again.
    prune_checkpoints(run, run.config.training.keep_checkpoints)
    get_run_logger().info(
        "step %d done in %.1f s, version %d, checkpoint %s",
        step,
        record.seconds,
        version,
        checkpoint.key,
    )
    return version


def durable_version(run: Run) -> int:
    """The newest version that is there whatever happens: that of a checkpoint, or the first."""
    return max(checkpoint_versions(run), default=0)


def _ahead(run: Run, plan: StepPlan, version: int) -> StepPlan | None:
    """The batch that is rolled out while the step trains its own; None where the policy overlaps
    nothing, in the last step, and where its tokens would be too old and are not to be dropped."""
    training, staleness = run.config.training, run.config.staleness
    if not policy_of(run.config).pipeline.lag or plan.step + 1 >= training.steps:
        return None
    oldest = 2 * training.updates_per_step - 1
    if staleness.stale is StaleKind.WAIT and oldest > staleness.max:
        return None
    return step_plan(run, plan.step + 1, version)


def _end(board: Board, *tasks: PrefectFuture[Any]) -> None:
    board.stop()
    for task in tasks:
        task.wait()


def _keep_updates(run: Run, core: DaemonClient, epoch: int, step: int) -> None:
    """The updates of a step that has failed go into a checkpoint, where the core can still save
    one: a retry then has not to train them again."""
    updates = range(run.config.training.updates_per_step)
    done = sum(run.store.exists(run.layout.update(step, update)) for update in updates)
    if done:
        with suppress(DaemonError, CheckpointError, StorageError, OSError):
            save_checkpoint(run, core, epoch=epoch, step=step, update=done)


def _cut_short(hosts: Hosts, board: Board, *tasks: PrefectFuture[Any]) -> None:
    """Cancelled: commands under way get a moment, then the cells that carry them out are ended."""
    board.stop()
    if hosts.warden is not None:
        hosts.warden.close(0.0)  # it would start again what is ended here
    deadline = time.monotonic() + _CANCEL_PATIENCE_S
    for task in tasks:
        task.wait(max(0.0, deadline - time.monotonic()))
    if not all(task.state.is_final() for task in tasks):
        for cell in hosts.cells.values():
            with suppress(DaemonError):
                cell.stop()


def _roll_out_and_build(
    run: Run, root: str, hosts: Hosts, board: Board, plan: StepPlan, feed: GroupFeed
) -> None:
    """Submit every stage of every group as soon as the stage before it has ended."""
    guard = ExclusionGuard(
        counted_together(run.config.training, len(plan.queries)),
        run.config.rollout.group_size,
        run.config.scoring.max_excluded_share,
    )
    sealed = _sealed(run, plan)
    for header in sealed:
        guard.count(sum(isinstance(member.verdict, Excluded) for member in header.members))
        feed.put(header.query_id)
    before = {header.query_id for header in sealed}
    temperature = run.config.rollout.temperature
    batches = [(query,) for query in plan.queries]
    builds: list[PrefectFuture[str]] = []
    scores: list[PrefectFuture[None]] = []
    for (query,), score in roll_out(
        run, root, hosts, board, batches, plan.policy_version, temperature
    ):
        if score is not None:
            scores.append(score)
        if query.query_id in before:
            continue  # the verdicts come late; they are kept
        # A score that failed for good leaves its execution out; it does not stop the group.
        settled = None if score is None else allow_failure(score)
        builds.append(
            build_samples.submit(root, run.run_id, plan.step, query, feed, guard, board, settled)
        )
    # What failed stops the step when all the others are done, so that a retry has only that to do.
    wait(scores)
    wait(builds)
    board.check()
    for build in builds:
        build.result()


def _sealed(run: Run, plan: StepPlan) -> list[GroupHeader]:
    """Groups that earlier attempts have sealed, in that order."""
    keys = [run.layout.group(query.query_id) for query in plan.queries]
    headers = [read_group(run.store, key).header for key in keys if run.store.exists(key)]
    return sorted(headers, key=lambda header: header.sealed_at)
