"""An attempt at a run: its daemons, with the weights to go on from, whatever came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from prefect import get_run_logger

from cells.checkpoint import Checkpoint, find_checkpoint, latest_checkpoint
from cells.task import policy_of
from flows.earlier import close_earlier
from flows.history import evaluations_of
from flows.hosts import Hosts, hosts_of
from flows.proof import write_proof
from flows.rollouts import living
from flows.surviving import restore_core, surviving
from flows.warm_start import warm_start
from storage.copies import local_copy
from storage.hold import HeldError, alone
from storage.records import StepDone, StepPlan
from storage.run import Run

_TURN_LIMIT_S = 24 * 3600.0


class LostWeightsError(RuntimeError):
    """Weights that the run has to go on from are in no checkpoint."""


@dataclass(frozen=True)
class Start:
    """What daemons that are started anew begin with."""

    policy_key: str
    """HF directory in storage that engines and replicas start with."""
    version: int
    """The weight version that it is."""
    checkpoint: Checkpoint | None
    """What the core goes on from; None at the start of the run."""


@contextmanager
def turn(run: Run, say: Callable[[str], None]) -> Iterator[None]:
    """One attempt at a run at a time: a second one waits until the process of the first has ended.

    Prefect can report a crash twice, the second time of a retry that is well; whoever presses Retry
    once more starts another attempt beside it.

    Raises:
        HeldError: the other one went on for a day.
    """
    with ExitStack() as held:
        try:
            held.enter_context(alone(run.store, run.layout.turn))
        except HeldError:
            say(f"another attempt at run {run.run_id} is under way: this one waits for its end")
            held.enter_context(alone(run.store, run.layout.turn, _TURN_LIMIT_S))
        yield


def has_ended(run: Run) -> bool:
    """Whether all of the run is done, and what did it has ended in order, its daemons with it."""
    if run.store.children(run.layout.hosts):
        return False
    last = run.layout.step_done(run.config.training.steps - 1)
    if not run.store.exists(last):
        return False
    return run.store.read_record(last, StepDone).policy_version in evaluations_of(run)


@contextmanager
def attempt(root: str, run: Run) -> Iterator[Hosts]:
    """The daemons of a run, ready to go on where the last attempt has ended; ended with the block.

    What earlier attempts left unfinished in Prefect is marked as crashed.

    Raises:
        LostWeightsError: the newest checkpoint is older than what was already trained.
        StartError: a daemon did not start.
    """
    say = get_run_logger().info
    first = warm_start(root, run.run_id)
    start = starting_point(run, first)

    def again() -> tuple[str, int]:
        now = starting_point(run, first)
        return now.policy_key, now.version

    with hosts_of(run, start.policy_key, start.version, say, again, first) as hosts:
        if closed := close_earlier(run):
            say(f"{closed} runs of earlier attempts are marked as crashed")
        restore = partial(restore_core, run, hosts, start.checkpoint)
        surviving(run, hosts, "the start of the core", restore)
        try:
            yield hosts
        finally:
            # What happened is written whatever happened, with the processes still there to ask.
            write_proof(run, hosts)


def starting_point(run: Run, first_policy: str) -> Start:
    """Weights for daemons that are started anew.

    The core goes on from the newest checkpoint. Engines serve the version that the step under way
    was planned with as long as one of its executions has still to be run, also where a checkpoint
    inside the step is newer.

    Raises:
        LostWeightsError: a checkpoint that is needed is gone. To train again from an older one
            would give a version that rollouts were made with to other weights.
    """
    checkpoint = latest_checkpoint(run)
    newest = checkpoint.manifest.version if checkpoint else 0
    step, trained = first_undone(run)
    if newest < trained:
        raise LostWeightsError(
            f"run {run.run_id}: step {step - 1} ended with version {trained}, the newest whole "
            f"checkpoint has {newest}. Start a new run from what there is: --set "
            f"model.source=hf_directory --set model.path={_folder(run, checkpoint, first_policy)}"
        )
    # Where groups may outlive their step newer weights serve them as well.
    version = None if policy_of(run.config).pipeline.carries else _planned(run, step)
    if version is None:
        version = newest
    if not version:
        return Start(first_policy, 0, checkpoint)
    served = find_checkpoint(run, version)
    if served is None:
        raise LostWeightsError(
            f"run {run.run_id}: step {step} has executions to run with version {version}, and no "
            f"whole checkpoint holds it. Start a new run from what there is: --set "
            f"model.source=hf_directory --set model.path={_folder(run, checkpoint, first_policy)}"
        )
    return Start(served.policy_key, version, checkpoint)


def first_undone(run: Run) -> tuple[int, int]:
    """The first step that is not done, and the version that the one before it ended with."""
    version = 0
    for step in range(run.config.training.steps):
        key = run.layout.step_done(step)
        if not run.store.exists(key):
            return step, version
        version = run.store.read_record(key, StepDone).policy_version
    return run.config.training.steps, version


def _planned(run: Run, step: int) -> int | None:
    """The version that executions which have still to be run were planned with: those of ``step``,
    or of the next one where that is rolled out while this one trains."""
    for planned in (step, step + 1):
        key = run.layout.step_plan(planned)
        if run.store.exists(key):
            plan = run.store.read_record(key, StepPlan)
            if living(run, plan.queries):
                return plan.policy_version
    return None


def _folder(run: Run, checkpoint: Checkpoint | None, first_policy: str) -> str:
    return str(local_copy(run.store, checkpoint.policy_key if checkpoint else first_policy))
