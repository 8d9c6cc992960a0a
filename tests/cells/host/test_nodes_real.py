"""A cell of two machines: this one, which leads, and a network namespace.

The tests of this file take turns on one cell, in order: its start is the expensive part.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cells.client import DaemonClient, DaemonError
from cells.host.nodes import agent_daemon
from cells.process import end_group
from storage.run import Run
from tests.cells.host.test_host_real import (
    Host,
    alive,
    assert_serves_what_the_replica_holds,
    exports,
    post,
    update,
    wait,
)
from tests.conftest import make_run
from tests.machines import Machine, machines

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900)]
LIMIT_S = 90


@pytest.fixture(scope="module")
def network() -> Iterator[dict[str, Machine]]:
    with machines("there") as made:
        yield made


class Agent:
    """``python -m cells.host.agent`` on the machine that is not here."""

    def __init__(self, run: Run, there: Machine, log: Path) -> None:
        argv = [*there.enter, sys.executable, "-m", "cells.host.agent"]
        argv += ["--root", run.store.url, "--run", run.run_id, "--cell", "a", "--node", "1"]
        with open(log, "wb") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        end_group(self.process.pid, grace_s=10)
        self.process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def run(network: dict[str, Machine], tmp_path_factory: pytest.TempPathFactory) -> Run:
    here, there = network["here"].address, network["there"].address
    return make_run(
        tmp_path_factory.mktemp("nodes"),
        f"cells.cells=[{{name: a, core: true, address: {here}, nodes: [{there}]}}]",
        "cells.layout.tensor=2",
        "cells.lease_s=600",
        "cells.start_limit_s=480",
    )


@pytest.fixture(scope="module")
def agent(run: Run, network: dict[str, Machine]) -> Iterator[Agent]:
    made = Agent(run, network["there"], run.store.local_path("agent.log"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def host(run: Run, agent: Agent, tiny_policy: Path) -> Iterator[Host]:
    made = Host(run, tiny_policy)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(host: Host) -> Iterator[DaemonClient]:
    client = host.client()
    yield client
    client.close()


def commands(processes: list[psutil.Process]) -> str:
    return "\n".join(" ".join(process.cmdline()) for process in processes)


def test_both_machines_have_their_part(host: Host, agent: Agent, client: DaemonClient) -> None:
    assert client.call("GET", "/status")["role"] == "rollout"
    there = commands(agent.family())
    assert "--rank 1" in there and "--node-rank 1" in there
    assert "--rank 1" not in commands(host.family())


def test_an_update_of_both_is_served_by_both(
    host: Host, client: DaemonClient, tmp_path: Path
) -> None:
    assert_serves_what_the_replica_holds(client, tmp_path / "first")
    assert post(client, "/role", epoch=1, role="training")["role"] == "training"
    update(host, client, 0)
    assert exports(host.run) == [], "not in the memory of one machine"
    assert_serves_what_the_replica_holds(client, tmp_path / "held")


def test_an_agent_needs_its_token(run: Run, client: DaemonClient) -> None:
    found = DaemonClient.find(run.store, run.layout, agent_daemon("a", 1))
    assert found.call("GET", "/status") == {"failure": ""}
    found._http.headers["authorization"] = "Bearer another"
    for method, path in (("GET", "/status"), ("POST", "/start"), ("POST", "/end")):
        with pytest.raises(DaemonError, match="401"):
            found.call(method, path)
    found.close()


def test_a_rank_that_dies_in_a_role_change_takes_the_whole_cell(
    host: Host, agent: Agent, client: DaemonClient
) -> None:
    """Never one machine in training and the other one not."""
    (rank,) = [one for one in agent.family() if "--rank" in one.cmdline()]
    os.kill(rank.pid, signal.SIGSTOP)
    with pytest.raises(DaemonError):
        client.call("POST", "/role", {"epoch": 1, "role": "training"}, limit_s=2)
    assert client.call("GET", "/status")["role"] == "switching"
    os.kill(rank.pid, signal.SIGKILL)
    wait(lambda: client.call("GET", "/status")["role"] == "failed", LIMIT_S)
    with pytest.raises(DaemonError, match="422"):
        post(client, "/role", epoch=1, role="rollout")


def test_the_agent_ends_its_part_with_the_cell(host: Host, agent: Agent) -> None:
    parts = agent.family()
    host.close()
    wait(lambda: not alive(parts), LIMIT_S)
    assert agent.process.poll() is None, "it waits for the next leader"
