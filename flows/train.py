"""Flow ``train``: a whole run, one ``rl_step`` a step, with held-out evaluation around it."""

from __future__ import annotations

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from cells.checkpoint import Checkpoint, latest_checkpoint
from cells.epoch import take_epoch
from configs.load import load_config
from flows.doctor.preflight import preflight
from flows.evaluate import evaluate_serving
from flows.hosts import Hosts, hosts_of
from flows.proof import write_proof
from flows.rl_step import rl_step
from flows.rollouts import runner_for
from flows.roots import absolute_root
from flows.warm_start import warm_start
from storage.hold import hold_run
from storage.objects import Store
from storage.run import Run, create_run, open_run


@flow(name="train", flow_run_name="train {run_id}", persist_result=True)
def train(
    run_id: str = "",
    config: str = "quickstart",
    overrides: list[str] | None = None,
    root: str = ".gyre",
) -> str:
    """Train a policy from a configuration, or go on with a run that exists.

    Args:
        run_id: name of the run; empty makes one. A name that exists is resumed with its own
            settings, and `config` and `overrides` are not looked at.
        config: preset or path of a YAML file.
        overrides: settings over it, each `dotted.key=value`.
        root: folder or URL of the storage.
    """
    root = absolute_root(root)
    run = _open_or_create(root, run_id or _own_name(), config, overrides or [])
    say = get_run_logger().info
    first_policy = warm_start(root, run.run_id)
    checkpoint = latest_checkpoint(run)
    policy = checkpoint.policy_key if checkpoint else first_policy
    version = checkpoint.manifest.version if checkpoint else 0
    with hosts_of(run, policy, version, say) as hosts:
        _restore(run, hosts, checkpoint)
        try:
            if run.config.evaluation.before and checkpoint is None:
                evaluate_serving(root, run.run_id, 0)
            _steps(run, root)
        finally:
            # What happened is written whatever happened, with the processes still there to ask.
            write_proof(run, hosts)
    return run.run_id


def _steps(run: Run, root: str) -> None:
    training, every = run.config.training, run.config.evaluation.every
    runner = runner_for(run.config.rollout.queries)
    step_flow = rl_step.with_options(task_runner=runner)
    for step in range(training.steps):
        version = step_flow(root, run.run_id, step)
        last = step == training.steps - 1
        if last or (every and (step + 1) % every == 0):
            evaluate_serving(root, run.run_id, version)


def _restore(run: Run, hosts: Hosts, checkpoint: Checkpoint | None) -> None:
    """Give a fresh core the optimizer state of the checkpoint; an adopted one is ahead of it."""
    if checkpoint is None:
        return
    core = hosts.cells[hosts.core]
    if core.call("GET", "/status")["replica"]["version"] > checkpoint.manifest.version:
        return
    epoch = take_epoch(run.store, run.layout)
    args = {"path": str(run.store.local_path(checkpoint.state_key))}
    core.call(
        "POST",
        "/replica/restore",
        {"epoch": epoch, "args": args},
        limit_s=run.config.cells.switch_limit_s,
    )


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


def _own_name() -> str:
    """A name from the flow run's id, so that a retry of the flow finds its run."""
    return f"run-{str(flow_run.id)[:8]}"
