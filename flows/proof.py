"""run.json: what really ran, with which versions, on which processes, moving how many bytes."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from uuid import UUID

import orjson
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
)
from prefect.runtime import flow_run

from flows.hosts import Hosts
from storage.run import Run

_PACKAGES = (
    "sglang",
    "megatron-core",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "prefect",
    "torch",
    "renderers",
    "transformers",
)
_PAGE = 200


def write_proof(run: Run, hosts: Hosts) -> None:
    """Write run.json from what the living daemons say and what Prefect recorded.

    Raises:
        DaemonError: a daemon can't be asked.
    """
    cells = {name: client.call("GET", "/status") for name, client in hosts.cells.items()}
    proof = {
        "run_id": run.run_id,
        "config": run.config.name,
        "written_at": time.time(),
        "versions": _versions(),
        "gateway": {"pid": hosts.gateway.registration.pid},
        "executions": {"pid": hosts.executions.registration.pid},
        "cells": {name: _cell(status) for name, status in cells.items()},
        "prefect": _prefect_runs(),
    }
    run.store.write(run.layout.manifest, orjson.dumps(proof, option=orjson.OPT_INDENT_2))


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cell(status: dict[str, Any]) -> dict[str, Any]:
    engine, replica = status["engine"], status["replica"]
    return {
        "role": status["role"],
        "rollout": {"pid": engine["pid"], "cpu_s": engine["cpu_s"]},
        "training": {"pid": replica["pid"], "cpu_s": replica["cpu_s"]},
        "versions": {"engine": engine["version"], "replica": replica["version"]},
        "mooncake": status["mooncake"],
        "switches": status["switches"],
    }


def _prefect_runs() -> dict[str, Any]:
    """Ids of this flow run and of the task runs of each of its steps."""
    own = UUID(str(flow_run.id))
    with get_client(sync_client=True) as client:
        children = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[own])
            ),
            limit=_PAGE,
        )
        steps = {child.name: _task_runs(client, child.id) for child in children}
    return {"flow_run_id": str(own), "task_runs": steps}


def _task_runs(client: SyncPrefectClient, of: UUID) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    while True:
        page = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[of])),
            limit=_PAGE,
            offset=len(found),
        )
        found += [
            {"id": str(run.id), "name": run.name, "state": run.state_name or ""} for run in page
        ]
        if len(page) < _PAGE:
            return found
