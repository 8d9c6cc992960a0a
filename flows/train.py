"""Flow ``train``: a whole run, one ``rl_step`` a step, with held-out evaluation around it."""

from __future__ import annotations

from functools import partial
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from configs.load import load_config
from flows.aftermath import after_evaluation, after_step
from flows.attempt import attempt, has_ended, turn
from flows.doctor.preflight import preflight
from flows.earlier import close_children
from flows.evaluate import evaluate_serving
from flows.form import EMPTY, QUICKSTART, Preset, Settings, overrides_of
from flows.history import evaluations_of
from flows.hosts import Hosts
from flows.pause import pause_if_asked
from flows.report import reported
from flows.rl_step import run_step, version_after
from flows.roots import absolute_root, own_name
from flows.surviving import surviving
from storage.hold import hold_run
from storage.objects import Store
from storage.run import Run, create_run, open_run


@flow(
    name="train",
    flow_run_name="train {run_id}",
    persist_result=True,
    on_crashed=[close_children],
)
def train(
    run_id: str = "",
    preset: Preset = QUICKSTART,
    settings: Settings = EMPTY,
    config: str = "",
    overrides: tuple[str, ...] = (),
    root: str = ".gyre",
) -> str:
    """Train a policy from a configuration, or go on with a run that exists.

    Args:
        run_id: name of the run; empty makes one. A name that exists is resumed with its own
            settings, and the following are not looked at.
        preset: what the run starts from.
        settings: changes of it.
        config: absolute path of a YAML file that takes the preset's place.
        overrides: any settings over all these, each `dotted.key=value`.
        root: folder or URL of the storage.
    """
    root = absolute_root(root)
    changes = [*overrides_of(settings), *overrides]
    run = _open_or_create(
        root, run_id or own_name(UUID(str(flow_run.id))), config or preset.value, changes
    )
    with turn(run, get_run_logger().info):
        if has_ended(run):
            return run.run_id
        with reported(run, get_run_logger().warning), attempt(root, run) as hosts:
            version = surviving(run, hosts, "the start", hosts.core_version)
            if run.config.evaluation.before and version == 0:
                _evaluate(run, root, hosts, 0)
            _steps(run, root, hosts)
    return run.run_id


def _steps(run: Run, root: str, hosts: Hosts) -> None:
    training, every = run.config.training, run.config.evaluation.every
    for step in range(training.steps):
        version = version_after(run, step)
        if version is None:
            pause_if_asked(run)
            version = surviving(
                run, hosts, f"step {step}", partial(run_step, root, run.run_id, step)
            )
            after_step(run, step)
        last = step == training.steps - 1
        if last or (every and (step + 1) % every == 0):
            _evaluate(run, root, hosts, version)


def _evaluate(run: Run, root: str, hosts: Hosts, version: int) -> None:
    if version not in evaluations_of(run):
        surviving(run, hosts, "the evaluation", lambda: evaluate_serving(root, run.run_id, version))
        after_evaluation(run, version)


def _open_or_create(root: str, run_id: str, config: str, overrides: list[str]) -> Run:
    if run_id in Store(root).children("runs"):
        run = open_run(root, run_id)
        preflight(run.config, root, run_id)
    else:
        settings = load_config(config, [*overrides, f"storage.root={root}"])
        preflight(settings, root)  # before anything of the run is there
        run = create_run(root, run_id, settings)
    hold_run(run.store, run.layout)
    return run
