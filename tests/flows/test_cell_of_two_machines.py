"""A run with four cells on machines of their own, the ranks of one of them on two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import orjson
import pytest

from cells.decisions import Decision
from flows.history import updates_of
from storage.journal import read_journal
from storage.records import decode
from storage.run import Run, open_run
from tasks.sampling.group import read_calls
from tasks.warm_start.build import policy_key
from tests.flows.conftest import FinishedRun, finish, start_gyre
from tests.flows.orchestrated import MARK, logs, marked_processes
from tests.machines import Machine, machines

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1800)]

AWAY = {"b": "b", "c": "c", "d": "d", "d --node 1": "e"}
"""Words of ``gyre host`` and the machine that it is given on."""
LIMIT_S = 90


class Spread(NamedTuple):
    """A finished run, and what the commands that hosted its cells said."""

    run: Run
    said: dict[str, str]


@pytest.fixture(scope="module")
def network() -> Iterator[dict[str, Machine]]:
    with machines(*AWAY.values()) as made:
        yield made


@pytest.fixture(scope="module")
def spread(
    smoke_run: FinishedRun, network: dict[str, Machine], tmp_path_factory: pytest.TempPathFactory
) -> Spread:
    """`gyre train` of two elastic steps here, `gyre host` on the four other machines."""
    root = tmp_path_factory.mktemp("spread")
    policy = smoke_run.run.store.local_path(policy_key(smoke_run.run.config))
    address = {name: machine.address for name, machine in network.items()}
    cells = [
        f"{{name: a, core: true, address: {address['here']}}}",
        f"{{name: b, elsewhere: true, address: {address['b']}}}",
        f"{{name: c, elsewhere: true, address: {address['c']}}}",
        f"{{name: d, elsewhere: true, address: {address['d']}, nodes: [{address['e']}]}}",
    ]
    settings = [
        f"cells.cells=[{', '.join(cells)}]",
        "cells.layout.tensor=2",
        "cells.policy=elastic",
        "cells.start_limit_s=600",
        "cells.lease_s=120",  # fifteen processes start on the cores of one machine
        "model.source=hf_directory",
        f"model.path={policy}",
        "problems.specrepo.slow_share=0.5",
        "problems.specrepo.slow_median_s=4",
        "training.steps=2",
        "evaluation.before=false",
        "evaluation.problems=1",
    ]
    chosen = [part for setting in settings for part in ("--set", setting)]
    hosts = {
        words: subprocess.Popen(
            [
                *(*network[place].enter, sys.executable, "-m", "flows.cli", "host", "spread"),
                *(*words.split(), "--root", str(root), "--wait", "900"),
            ],
            env={**os.environ, MARK: str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words, place in AWAY.items()
    }
    try:
        command = start_gyre(root, "train", "--config", "smoke", "--name", "spread", *chosen)
        output = finish(command, root)
        assert command.returncode == 0, f"{output[-6000:]}\n{logs(root)}"
    finally:
        for host in hosts.values():
            host.terminate()
        said = {words: host.communicate(timeout=LIMIT_S)[0] for words, host in hosts.items()}
    assert marked_processes(root) == []
    return Spread(open_run(str(root), "spread"), said)


def test_every_cell_served_and_trained_with_the_others(spread: Spread) -> None:
    run = spread.run
    calls = [
        call
        for name in run.store.children(f"{run.layout.prefix}/executions")
        for call in read_calls(run.store, run.layout, name)
    ]
    assert {call.cell for call in calls} == {"a", "b", "c", "d"}
    updates = updates_of(run)
    assert len(updates) == 4
    assert updates[0].logprob_gap_max < 1e-3, "each engine computed what the replicas do"
    proof = orjson.loads(run.store.read(run.layout.manifest))
    for cell in "bcd":
        assert proof["cells"][cell]["mooncake"]["read_bytes"] > 0, "weights came over the network"
    print({name: cell["mooncake"] for name, cell in proof["cells"].items()})


def test_cells_changed_sides_as_a_whole(spread: Spread) -> None:
    run = spread.run
    rows = read_journal(run.store, run.layout.decisions)
    moves = [decode(row, Decision) for row in rows]
    assert [move for move in moves if move.failed] == []
    proof = orjson.loads(run.store.read(run.layout.manifest))
    assert {name: cell["role"] for name, cell in proof["cells"].items()} == dict.fromkeys(
        "abcd", "rollout"
    )
    assert {cell["versions"]["engine"] for cell in proof["cells"].values()} == {4}
    print([(move.cell, move.to, round(move.seconds, 2)) for move in moves])


def test_the_agent_did_its_part_once(spread: Spread) -> None:
    said = spread.said["d --node 1"]
    assert said.count("starting for attempt 1") == 1, said
    assert "attempt 1 is over" in said
