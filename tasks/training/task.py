"""The Prefect task of a step's streaming training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from cells.board import Board
from cells.checkpoint import save_checkpoint
from cells.client import DaemonClient
from cells.scheduler import Adaptive, Pace, TrainingWork
from cells.task import policy_of
from storage.journal import append_line, read_lines
from storage.records import UpdateMetrics, decode, encode
from storage.run import Run, open_run
from tasks.training.anchors import anchors_of
from tasks.training.feed import GroupFeed
from tasks.training.health import alarms, refuse
from tasks.training.metrics import Spent
from tasks.training.replica import HostReplica
from tasks.training.stream import read_updates
from tasks.training.stream import train_stream as run_stream


@task(
    name="train_stream",
    task_run_name="train_stream",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def train_stream(
    root: str,
    run_id: str,
    step: int,
    groups: int,
    epoch: int,
    board: Board,
    feed: GroupFeed,
    cells: dict[str, DaemonClient],
    core: str,
) -> int:
    """Train the updates of a step on whichever cells are in the training role.

    Returns the version that the step ends with; cells that go back to rollout serve it.
    """
    run = open_run(root, run_id)
    logger = get_run_logger()
    policy = policy_of(run.config)
    last = step + 1 == run.config.training.steps
    ports = {
        name: HostReplica(client, name=name, core=name == core, epoch=epoch)
        for name, client in cells.items()
    }

    def members() -> Sequence[HostReplica]:
        board.check()
        return [ports[name] for name in board.trainers()]

    def report(work: TrainingWork) -> None:
        # That nothing is left is told below, together with the version to go back with.
        if work.expected:
            board.set_work(work)

    def updated(metrics: UpdateMetrics) -> None:
        logger.info("update %d: version %d", metrics.update, metrics.policy_version)
        keep_metrics(run, step, metrics.update + 1)
        found = alarms(metrics, run.config.training.health)
        for alarm in found:
            logger.warning(alarm.text)
        refuse(found)
        done, every = metrics.update + 1, run.config.training.checkpoint_every
        if carries():
            # What serves must be there after any crash: no version may have two sets of weights.
            save_checkpoint(run, cells[core], epoch=epoch, step=step, update=done)
            board.serve(metrics.policy_version)
        elif every and done % every == 0 and done < run.config.training.updates_per_step:
            save_checkpoint(run, cells[core], epoch=epoch, step=step, update=done)
        board.updated(metrics.policy_version)

    def carries() -> bool:
        return board.pace is Pace.CARRY

    def holds() -> bool:
        return isinstance(policy, Adaptive) and carries() and policy.holds(board.oldest)

    try:
        updates = run_stream(
            store=run.store,
            layout=run.layout,
            config=run.config,
            step=step,
            groups=groups,
            feed=feed,
            members=members,
            spent=_since_last_call(board),
            anchors=lambda version: anchors_of(run, version),
            on_update=updated,
            report=report,
            held=board.set_held,
            waits=partial(board.progress.waits, "training"),
            carries=policy.pipeline.carries,
            holds=holds,
            more=lambda: carries() and not last,
        )
    except BaseException as error:
        board.fail(error)
        raise
    keep_metrics(run, step, len(updates))
    if board.newer:  # what goes on into the next step is served at once
        save_checkpoint(run, cells[core], epoch=epoch, step=step, update=len(updates))
    version = int(cells[core].call("GET", "/status")["replica"]["version"])
    board.serve(version)
    if last or not carries():
        board.set_work(TrainingWork())
    return version


def keep_metrics(run: Run, step: int, updates: int) -> None:
    """Add to metrics.jsonl what it lacks of the first updates of a step.

    In their order: an attempt may have died between the record of an update and its line here.
    """
    key = run.layout.metrics
    lines = [decode(line, UpdateMetrics, where=key) for line in read_lines(run.store, key)]
    known = {(line.step, line.update) for line in lines}
    for update in read_updates(run.store, run.layout, step, updates):
        if (update.step, update.update) not in known:
            append_line(run.store, key, encode(update))


def _since_last_call(board: Board) -> Callable[[], Spent]:
    """Seconds of rollout and of switching that each update took, not counted twice."""
    last = Spent(0.0, 0.0)

    def spent() -> Spent:
        nonlocal last
        now = Spent(board.rollout_s, board.switch_s)
        since = Spent(now.rollout_s - last.rollout_s, now.switch_s - last.switch_s)
        last = now
        return since

    return spent
