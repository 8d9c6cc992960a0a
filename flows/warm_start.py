"""Flow ``warm_start``: the policy that a run starts from, made once for each configuration."""

from __future__ import annotations

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.model import ModelSource
from storage.journal import append_line
from storage.run import open_run
from tasks.warm_start.policies import first_policy, import_policy, remember_policy


@task(name="fit policy", cache_policy=NO_CACHE)
def fit_policy(root: str, run_id: str) -> str:
    """Key of the HF directory in storage. Found again when it was made before."""
    run = open_run(root, run_id)
    logger = get_run_logger()

    def say(line: str) -> None:
        logger.info(line)
        append_line(run.store, run.layout.log("warm_start"), line.encode())

    if known := first_policy(run):
        return known
    if run.config.model.source is ModelSource.HF_DIRECTORY:
        key = import_policy(run.store, run.config)
    else:
        # Brings torch and transformers, seconds of start-up that no other part of a flow needs.
        from tasks.warm_start.build import build_policy

        key = build_policy(run.store, run.config, say)
    remember_policy(run, key)
    return key


@flow(name="warm_start", flow_run_name="{run_id} warm start", persist_result=True)
def warm_start(root: str, run_id: str) -> str:
    """Make the first policy of a run and return its key in storage."""
    return fit_policy(root, run_id)
