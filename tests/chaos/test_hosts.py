"""The daemons of a run are killed one after the other, and the same clients lead to new ones.

In the cell host stand-ins take the place of engine and replica.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cells import warden as warden_module
from cells.client import DaemonClient
from flows.hosts import EXECUTIONS, GATEWAY, Hosts, cell_daemon, hosts_of
from tests.conftest import make_run
from tests.flows.orchestrated import environment

LIMIT_S = 280.0


def kill(hosts: Hosts, name: str, client: DaemonClient) -> None:
    before = client.registration
    os.kill(before.pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while client.registration.incarnation == before.incarnation:
        assert time.monotonic() < deadline, f"{name} did not come back"
        time.sleep(0.1)
    assert hosts.warden is not None and hosts.warden.restarts(name) == 1
    found = client.call("GET", "/healthz", limit_s=60)
    assert found["incarnation"] == client.registration.incarnation


@pytest.mark.timeout(1200)
def test_every_daemon_of_a_run_comes_back(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warden_module, "FIRST_PAUSE_S", 0.01)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    run = make_run(tmp_path / "root", "cells.cells=[{name: a, core: true}]", "harness.name=loop")
    for path in tiny_policy.iterdir():
        for key in ("policies/tiny", "policies/older"):
            run.store.write(f"{key}/{path.name}", path.read_bytes())
    told: list[str] = []
    starts: list[tuple[str, int]] = []

    def again() -> tuple[str, int]:
        starts.append(("policies/tiny", 3))
        return starts[-1]

    with hosts_of(run, "policies/older", 0, told.append, again, "policies/tiny") as hosts:
        assert hosts.core_version() == 0
        run.store.delete("policies/older")  # as a checkpoint is after a few steps
        kill(hosts, GATEWAY, hosts.gateway)
        assert hosts.gateway.call("GET", "/admin/state")["live"] == 0
        kill(hosts, EXECUTIONS, hosts.executions)
        assert hosts.executions.call("GET", "/state")["running"] == 0
        kill(hosts, cell_daemon("a"), hosts.cells["a"])
        assert starts and hosts.core_version() == 3, "with the weights to go on from"
    assert sum("has ended: started again, 1 of 5 times" in line for line in told) == 3
    assert run.store.children(run.layout.hosts) == []
