"""Flow ``warm_start``: the policy that a run starts from, made once for each configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.load import load_config
from configs.model import ModelSource
from configs.run import RunConfig
from flows.form import EMPTY, QUICKSTART, Preset, Settings, overrides_of
from flows.roots import absolute_root
from storage.journal import append_line
from storage.objects import Store
from storage.run import Run, open_run
from tasks.warm_start.policies import first_policy, import_policy, remember_policy


@task(name="fit policy", cache_policy=NO_CACHE)
def fit_policy(root: str, run_id: str) -> str:
    """Key of the HF directory in storage. Found again when it was made before."""
    run = open_run(root, run_id)
    if known := first_policy(run):
        return known
    key = _policy(run.store, run.config, partial(_log_and_keep, run, get_run_logger().info))
    remember_policy(run, key)
    return key


@flow(name="warm_start", flow_run_name="{run_id} warm start", persist_result=True)
def warm_start(
    root: str,
    run_id: str = "",
    preset: Preset = QUICKSTART,
    settings: Settings = EMPTY,
    overrides: tuple[str, ...] = (),
) -> str:
    """Make the first policy of a run, or of settings that runs will have, and return its key.

    Args:
        root: folder or URL of the storage.
        run_id: a run that exists; empty makes the policy of the settings that follow.
        preset: what they start from.
        settings: changes of it.
        overrides: any settings over all these, each `dotted.key=value`.
    """
    root = absolute_root(root)
    if run_id:
        return fit_policy(root, run_id)
    config = load_config(preset.value, [*overrides_of(settings), *overrides])
    return _policy(Store(root), config, get_run_logger().info)


def _policy(store: Store, config: RunConfig, say: Callable[[str], None]) -> str:
    if config.model.source is ModelSource.HF_DIRECTORY:
        return import_policy(store, config)
    # Brings torch and transformers, seconds of start-up that no other part of a flow needs.
    from tasks.warm_start.build import build_policy

    return build_policy(store, config, say)


def _log_and_keep(run: Run, log: Callable[[str], None], line: str) -> None:
    log(line)
    append_line(run.store, run.layout.log("warm_start"), line.encode())
