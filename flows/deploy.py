"""Deployments: what can be started, scheduled and triggered in the Prefect UI."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from prefect import Flow
from prefect.deployments.runner import RunnerDeployment
from prefect.types.entrypoint import EntrypointType

from flows.evaluate import evaluate
from flows.rescore import rescore_run
from flows.rl_step import rl_step
from flows.train import train

_FLOWS: dict[str, Flow[Any, Any]] = {
    "train": train,
    "rl_step": rl_step,
    "evaluate": evaluate,
    "rescore": rescore_run,
}
_ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
"""When a run was cancelled or killed, its worker starts a script of Prefect's that loads the flow.
The script's folder has a `storage.py`, which would hide our package."""


def deploy(work_pool: str, root: str) -> dict[str, UUID]:
    """Create or update the deployment of every flow and return their ids by flow name.

    Args:
        root: absolute folder or URL of the storage, the default of runs that are started in the UI:
            a worker runs them in a folder of its own, where a relative one would be lost.
    """
    ids = {}
    for name, flow in _FLOWS.items():
        deployment = RunnerDeployment.from_flow(
            flow,
            name,
            work_pool_name=work_pool,
            description=flow.description,
            tags=["gyre"],
            parameters={"root": root},
            # By module, so that a worker needs the installed package and no folder.
            entrypoint_type=EntrypointType.MODULE_PATH,
            job_variables={"env": _ENVIRONMENT},
        )
        ids[name] = cast(UUID, deployment.apply())  # a coroutine only inside an event loop
    return ids
