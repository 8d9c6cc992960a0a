"""run.json: what really ran, with which versions, on which processes, moving how many bytes."""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from uuid import UUID

import orjson
from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

from cells.client import DaemonClient, DaemonError
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

FORMAT = 1
"""Of run.json."""


def write_proof(run: Run, hosts: Hosts) -> None:
    """Write run.json from what the daemons say and what Prefect recorded.

    A part that can't be asked any more is there with its error. What earlier attempts at the run
    left is kept under ``earlier_attempts``.
    """
    proof = {
        "format": FORMAT,
        "run_id": run.run_id,
        "config": run.config.name,
        "written_at": time.time(),
        "versions": _versions(),
        "flow": {"pid": os.getpid(), "cpu_s": time.process_time()},
        "gateway": {"pid": hosts.gateway.registration.pid},
        "executions": {"pid": hosts.executions.registration.pid},
        "cells": {name: _cell(client) for name, client in hosts.cells.items()},
        "prefect": _prefect_runs(),
        "earlier_attempts": _earlier(run),
    }
    run.store.write(run.layout.manifest, orjson.dumps(proof, option=orjson.OPT_INDENT_2))


def _earlier(run: Run) -> list[dict[str, Any]]:
    if not run.store.exists(run.layout.manifest):
        return []
    last = orjson.loads(run.store.read(run.layout.manifest))
    return [*last.pop("earlier_attempts", []), last]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cell(client: DaemonClient) -> dict[str, Any]:
    try:
        status = client.call("GET", "/status", params={"cpu": 1})
    except DaemonError as error:
        return {"error": str(error)}
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
    try:
        with get_client(sync_client=True) as client:
            steps = {child.name: _task_runs(client, child.id) for child in _children(client, own)}
    except (HTTPError, PrefectException) as error:
        return {"flow_run_id": str(own), "error": str(error)}
    return {"flow_run_id": str(own), "task_runs": steps}


def _children(client: SyncPrefectClient, of: UUID) -> list[FlowRun]:
    parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[of]))
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(flow_run_filter=parent, limit=_PAGE, offset=len(found))
        found += page
        if len(page) < _PAGE:
            return found


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
