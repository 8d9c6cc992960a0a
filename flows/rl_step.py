"""Flow ``rl_step``: launch rollouts, score, build samples, train, while cells move."""

from __future__ import annotations

import time

from prefect import flow, get_run_logger
from prefect.futures import PrefectFuture
from prefect.utilities.annotations import allow_failure

from cells.board import Board
from cells.checkpoint import prune_checkpoints, save_checkpoint
from cells.epoch import take_epoch
from cells.task import manage_cells
from flows.hosts import Hosts, find_hosts
from flows.plan import step_plan
from flows.rollouts import living, roll_out
from storage.records import StepDone, StepPlan
from storage.run import Run, open_run
from tasks.sampling.guard import ExclusionGuard
from tasks.sampling.task import build_samples
from tasks.training.feed import GroupFeed
from tasks.training.plan import update_shares
from tasks.training.task import train_stream


@flow(name="rl_step", flow_run_name="{run_id} step {step}", persist_result=True)
def rl_step(root: str, run_id: str, step: int) -> int:
    """Run one step on the daemons of its run and return the version that it ends with.

    A step that is done already returns at once; an unfinished one goes on from what is stored.
    """
    run = open_run(root, run_id)
    if run.store.exists(run.layout.step_done(step)):
        return run.store.read_record(run.layout.step_done(step), StepDone).policy_version
    began = time.monotonic()
    hosts = find_hosts(run)
    core = hosts.cells[hosts.core]
    plan = step_plan(run, step, int(core.call("GET", "/status")["replica"]["version"]))
    epoch = take_epoch(run.store, run.layout)
    board = Board(
        live=living(run, plan.queries),
        serve_version=plan.policy_version,
        expected=len(plan.queries),
    )
    feed = GroupFeed()
    manager = manage_cells.submit(root, run_id, step, epoch, board, hosts.cells, hosts.gateway)
    groups = len(plan.queries)
    trainer = train_stream.submit(
        root, run_id, step, groups, epoch, board, feed, hosts.cells, hosts.core
    )
    try:
        board.wait_serving(run.config.cells.switch_limit_s)
        _roll_out_and_build(run, root, hosts, board, plan, feed)
        feed.close()
        version = trainer.result()
        checkpoint = save_checkpoint(
            run, core, epoch=epoch, step=step, update=run.config.training.updates_per_step
        )
    except BaseException as error:
        feed.fail(error)
        raise
    finally:
        board.stop()
        manager.wait()
        trainer.wait()
    prune_checkpoints(run, run.config.training.keep_checkpoints)
    done = StepDone(step=step, policy_version=version, seconds=time.monotonic() - began)
    run.store.write_record_once(run.layout.step_done(step), done)
    get_run_logger().info(
        "step %d done in %.1f s, version %d, checkpoint %s",
        step,
        done.seconds,
        version,
        checkpoint.key,
    )
    return version


def _roll_out_and_build(
    run: Run, root: str, hosts: Hosts, board: Board, plan: StepPlan, feed: GroupFeed
) -> None:
    """Submit every stage of every group as soon as the stage before it has ended."""
    builds: list[PrefectFuture[str]] = []
    guard = ExclusionGuard(
        update_shares(len(plan.queries), run.config.training.updates_per_step),
        run.config.rollout.group_size,
        run.config.scoring.max_excluded_share,
    )
    temperature = run.config.rollout.temperature
    batches = [(query,) for query in plan.queries]
    for (query,), score in roll_out(
        run, root, hosts, board, batches, plan.policy_version, temperature
    ):
        # A score that failed for good leaves its execution out; it does not stop the group.
        builds.append(
            build_samples.submit(
                root, run.run_id, plan.step, query, feed, guard, allow_failure(score)
            )
        )
    for build in builds:
        build.result()
