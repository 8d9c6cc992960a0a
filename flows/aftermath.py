"""What is told of a step and of an evaluation when it is over: events, a page in the UI, and
figures for trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefect import get_run_logger

from cells.checkpoint import find_checkpoint
from cells.decisions import ALL_CELLS, Decision
from flows import events
from flows.estimates import paired_gain
from flows.history import evaluations_of, updates_of
from flows.step_page import show_step
from flows.tracking.track import track
from storage.journal import read_journal
from storage.objects import MissingObjectError
from storage.records import Evaluation, GroupHeader, StepDone, StepPlan, decode
from storage.run import Run
from storage.samples import read_header
from tasks.training.health import alarms


def after_step(run: Run, step: int) -> None:
    """Tell Prefect of a step that is done. What fails here is no reason for a run to fail."""
    try:
        _after_step(run, step)
    except Exception as error:  # noqa: BLE001
        get_run_logger().warning("step %d: not all of it was told: %s", step, error)
    track(run, get_run_logger().warning)


def after_evaluation(run: Run, version: int) -> None:
    """Tell Prefect of an evaluation, and of a pass rate that fell by more than noise."""
    try:
        found = evaluations_of(run)
        events.evaluated(run, found[version])
        if fall := fallen(found, version):
            best, interval = fall
            events.pass_rate_fell(run, best, found[version], interval)
    except Exception as error:  # noqa: BLE001
        get_run_logger().warning("the evaluation was not told: %s", error)
    track(run, get_run_logger().warning)


def fallen(
    found: Mapping[int, Evaluation], version: int
) -> tuple[Evaluation, tuple[float, float]] | None:
    """The best version before, where this one is worse by more than noise, and by how much:
    Student's 95 % interval, paired over the problems."""
    before = [one for number, one in found.items() if number < version]
    if not before:
        return None
    best = max(before, key=lambda one: one.pass_rate)
    gain = paired_gain(best.rates, found[version].rates)
    if gain is None or gain.count < 2 or gain.interval[1] >= 0:
        return None
    return best, gain.interval


def _after_step(run: Run, step: int) -> None:
    done = run.store.read_record(run.layout.step_done(step), StepDone)
    updates = [update for update in updates_of(run) if update.step == step]
    headers = _headers(run, step)
    lines = read_journal(run.store, run.layout.decisions)
    decisions = [decode(line, Decision, where=run.layout.decisions) for line in lines]
    own = [one for one in decisions if one.step == step]
    events.cells_switched(run, [one for one in own if one.cell != ALL_CELLS])
    events.executions_excluded(run, headers)
    checkpoint = find_checkpoint(run, done.policy_version)
    if checkpoint is not None:
        events.checkpoint_published(run, checkpoint)
    events.step_finished(run, done, updates, headers)
    texts = [one.text for update in updates for one in alarms(update, run.config.training.health)]
    if texts:
        events.alarm(run, step, texts)
    show_step(run, done, headers, own)


def _headers(run: Run, step: int) -> Sequence[GroupHeader]:
    plan = run.store.read_record(run.layout.step_plan(step), StepPlan)
    found = []
    for query in plan.queries:
        try:
            found.append(read_header(run.store, run.layout.group(query.query_id)))
        except MissingObjectError:
            continue  # carried over to a later step
    return found
