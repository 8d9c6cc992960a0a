"""Deployments: what can be started, scheduled and triggered in the Prefect UI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.types.entrypoint import EntrypointType

from flows.evaluate import evaluate
from flows.rescore import rescore_run
from flows.rl_step import rl_step
from flows.server import CELLS_QUEUE
from flows.sweep.flow import sweep
from flows.train import train
from flows.warm_start import warm_start

TAG = "gyre"
"""Of every deployment, and so of all their flow runs."""
PLAIN_QUEUE = "default"
ENVIRONMENT = {
    # When a run was cancelled or killed, its worker starts a script of Prefect's that loads the
    # flow. The script's folder has a `storage.py`, which would hide our package.
    "PYTHONSAFEPATH": "1",
}


@dataclass(frozen=True)
class Deployed:
    """How a flow is deployed."""

    flow: Flow[Any, Any]
    tag: str
    """What kind of work it is, beside the tag of all."""
    queue: str = CELLS_QUEUE


DEPLOYED: dict[str, Deployed] = {
    "train": Deployed(train, "training"),
    "rl_step": Deployed(rl_step, "training"),
    "evaluate": Deployed(evaluate, "evaluation"),
    "rescore": Deployed(rescore_run, "evaluation"),
    "sweep": Deployed(sweep, "comparison", queue=PLAIN_QUEUE),
    "warm_start": Deployed(warm_start, "training"),
}


def deploy(
    work_pool: str, root: str, environment: Mapping[str, str] | None = None
) -> dict[str, UUID]:
    """Create or update the deployment of every flow and return their ids by flow name.

    Schedules that a deployment has stay, and so does what its environment was given before.

    Args:
        root: absolute folder or URL of the storage, the default of runs that are started in the UI:
            a worker runs them in a folder of its own, where a relative one would be lost.
        environment: further variables of the flows' processes. A value may be a reference to a
            block, ``{{ prefect.blocks.secret.NAME }}``, which the worker resolves.
    """
    ids = {}
    for name, one in DEPLOYED.items():
        env = {**_environment_of(name), **ENVIRONMENT, **(environment or {})}
        deployment = RunnerDeployment.from_flow(
            one.flow,
            name,
            work_pool_name=work_pool,
            work_queue_name=one.queue,
            description=one.flow.description,
            tags=[TAG, one.tag],
            parameters={"root": root},
            # By module, so that a worker needs the installed package and no folder.
            entrypoint_type=EntrypointType.MODULE_PATH,
            job_variables={"env": env},
        )
        ids[name] = cast(UUID, deployment.apply())  # a coroutine only inside an event loop
    return ids


def _environment_of(name: str) -> dict[str, str]:
    """What a deployment gives its flows now; nothing where there is none."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(f"{name}/{name}")
        except ObjectNotFound:
            return {}
    return dict(found.job_variables.get("env") or {})
