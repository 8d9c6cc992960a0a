"""Deployments: what can be started, scheduled and triggered in the Prefect UI."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from prefect import Flow
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.deployments.runner import RunnerDeployment
from prefect.types.entrypoint import EntrypointType

from flows.evaluate import evaluate
from flows.train import train

_FLOWS: dict[str, Flow[Any, Any]] = {"train": train, "evaluate": evaluate}
_PARALLEL_RUNS = 1
"""Two runs on one machine would share its cells' cores."""


def deploy(work_pool: str) -> dict[str, UUID]:
    """Create or update the deployment of every flow and return their ids by flow name."""
    ids = {}
    for name, flow in _FLOWS.items():
        deployment = RunnerDeployment.from_flow(
            flow,
            name,
            work_pool_name=work_pool,
            description=flow.description,
            tags=["gyre"],
            concurrency_limit=ConcurrencyLimitConfig(limit=_PARALLEL_RUNS),
            # By module, so that a worker needs the installed package and no folder.
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        ids[name] = cast(UUID, deployment.apply())  # a coroutine only inside an event loop
    return ids
