"""Cells that have addresses of their own, in network namespaces, and are started there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from configs.load import ConfigError, load_config
from flows.cell_host import await_run, cell_of
from flows.cli import app
from flows.console import ExitCode
from flows.history import updates_of
from storage.run import Run, create_run, open_run
from tasks.sampling.group import read_calls
from tasks.warm_start.build import policy_key
from tests.flows.conftest import FinishedRun, finish, start_gyre
from tests.flows.orchestrated import MARK, logs, marked_processes

AWAY = ("b", "c", "d")
BRIDGE = f"gyre{os.getpid() % 10_000}"
SUBNET = f"10.77.{os.getpid() % 250}"
LIMIT_S = 60


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=LIMIT_S)


def namespace(cell: str) -> str:
    return f"{BRIDGE}-{cell}"


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Address of each cell; those of ``AWAY`` are in namespaces of their own, on one bridge."""
    found = {cell: f"{SUBNET}.{at}" for at, cell in enumerate(("a", *AWAY), 1)}
    made: list[str] = []
    ip("link", "add", BRIDGE, "type", "bridge")
    try:
        ip("address", "add", f"{found['a']}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for cell in AWAY:
            inside, outside = namespace(cell), f"{BRIDGE}{cell}"
            ip("netns", "add", inside)
            made.append(inside)
            ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", inside)
            ip("link", "set", outside, "master", BRIDGE, "up")
            ip("-n", inside, "address", "add", f"{found[cell]}/24", "dev", "eth0")
            ip("-n", inside, "link", "set", "eth0", "up")
            ip("-n", inside, "link", "set", "lo", "up")
        yield found
    finally:
        for inside in made:
            ip("netns", "delete", inside)
        ip("link", "delete", BRIDGE)


@dataclass(frozen=True)
class Spread:
    """A finished run, and how the commands that hosted its cells ended."""

    run: Run
    codes: dict[str, int]
    said: dict[str, str]


@pytest.fixture(scope="module")
def spread(
    smoke_run: FinishedRun,
    addresses: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Spread:
    """`gyre train` of one step here, `gyre host` of three cells elsewhere, started before it."""
    root = tmp_path_factory.mktemp("spread")
    hosts = {cell: start_host(root, cell) for cell in AWAY}
    policy = smoke_run.run.store.local_path(policy_key(smoke_run.run.config))
    cells = [f"{{name: a, core: true, address: {addresses['a']}}}"]
    cells += [f"{{name: {c}, elsewhere: true, address: {addresses[c]}}}" for c in AWAY]
    settings = [
        f"cells.cells=[{', '.join(cells)}]",
        "model.source=hf_directory",
        f"model.path={policy}",
        "training.steps=1",
        "evaluation.before=false",
        "evaluation.problems=1",
    ]
    chosen = [part for setting in settings for part in ("--set", setting)]
    try:
        command = start_gyre(root, "train", "--config", "smoke", "--name", "spread", *chosen)
        output = finish(command, root)
        assert command.returncode == 0, f"{output[-6000:]}\n{logs(root)}"
    finally:
        for host in hosts.values():
            host.terminate()  # not SIGINT, which a suite in the background ignores
        said = {cell: host.communicate(timeout=LIMIT_S)[0] for cell, host in hosts.items()}
    assert marked_processes(root) == []
    codes = {cell: host.returncode for cell, host in hosts.items()}
    return Spread(open_run(str(root), "spread"), codes, said)


def start_host(root: Path, cell: str) -> subprocess.Popen[str]:
    argv = ["ip", "netns", "exec", namespace(cell), sys.executable, "-m", "flows.cli", "host"]
    return subprocess.Popen(
        [*argv, "spread", cell, "--root", str(root), "--wait", "600"],
        env={**os.environ, MARK: str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.real
@pytest.mark.timeout(1000)
def test_every_cell_served_and_trained(spread: Spread) -> None:
    run = spread.run
    calls = [
        call
        for name in run.store.children(f"{run.layout.prefix}/executions")
        for call in read_calls(run.store, run.layout, name)
    ]
    assert {call.cell for call in calls} == {"a", *AWAY}
    updates = updates_of(run)
    assert [update.update for update in updates] == [0, 1]
    assert updates[0].logprob_gap_max < 1e-3
    assert run.store.exists(run.layout.authority), "hosts and engines were reached with TLS"
    proof = orjson.loads(run.store.read(run.layout.manifest))
    for cell in AWAY:
        assert proof["cells"][cell]["mooncake"]["read_bytes"] > 0, "weights came over the network"


@pytest.mark.real
@pytest.mark.timeout(1000)
def test_hosts_started_once_and_waited_for_the_next_attempt(spread: Spread) -> None:
    for cell in AWAY:
        said = spread.said[cell]
        assert said.count("starting for attempt 1, version 0") == 1, said
        assert "attempt 1 is over" in said
        assert spread.codes[cell] == 130


def test_the_agent_of_a_further_machine_waits_for_an_attempt(tmp_path: Path) -> None:
    cell = "{name: a, core: true, address: 10.0.0.1, nodes: [10.0.0.2]}"
    config = load_config("smoke", [f"cells.cells=[{cell}]", "cells.layout.tensor=2"])
    create_run(str(tmp_path), "two", config)
    words = ["host", "two", "a", "--node", "1", "--root", str(tmp_path), "--wait", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "cell a: no attempt has wanted it for 1 s" in done.output
    words[4] = "2"
    assert CliRunner().invoke(app, words).exit_code == ExitCode.BAD_INPUT


def test_a_host_is_only_for_a_cell_that_is_elsewhere(run_store: Run) -> None:
    assert await_run(run_store.store.url, run_store.run_id, 1, print) == run_store
    with pytest.raises(ConfigError, match="has no cell z; it has a, b"):
        cell_of(run_store, "z")
    with pytest.raises(ConfigError, match=r"cell b .* is started by its flow"):
        cell_of(run_store, "b")
    with pytest.raises(ConfigError, match=r"cell b .* spans 1 machines: --node is from 0"):
        cell_of(run_store, "b", 1)
    with pytest.raises(TimeoutError, match="no run nowhere"):
        await_run(run_store.store.url, "nowhere", 0.1, print)


def test_the_ranks_of_a_cell_are_shared_out_evenly_over_its_machines() -> None:
    cell = "{name: a, core: true, address: 10.0.0.1, nodes: [10.0.0.2]}"
    with pytest.raises(ConfigError, match="spans 2 machines, which can't share out the 1 ranks"):
        load_config("smoke", [f"cells.cells=[{cell}]"])
    load_config("smoke", [f"cells.cells=[{cell}]", "cells.layout.tensor=2"])
    here = "{name: a, core: true, nodes: [10.0.0.2]}"
    with pytest.raises(ConfigError, match="give it the address of its first one"):
        load_config("smoke", [f"cells.cells=[{here}]", "cells.layout.tensor=2"])


def test_all_cells_have_addresses_or_none() -> None:
    with pytest.raises(ConfigError, match="give every cell an address"):
        load_config("smoke", ["cells.cells=[{name: a, core: true}, {name: b, address: 10.0.0.2}]"])
