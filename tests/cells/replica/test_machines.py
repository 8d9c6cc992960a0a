"""A replica whose ranks are on two machines: network namespaces, with an address each."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from cells.ports import free_port
from cells.process import end_group
from cells.replica.client import ReplicaClient, ReplicaDeadError, ReplicaRefusedError
from cells.replica.errors import ReplicaError
from cells.replica.frames import pack_frame, receive_frame
from cells.replica.meeting import TOKEN_VARIABLE, Meeting, join, use_interface_of, welcomed
from cells.replica.node_ranks import NodeRanks
from cells.replica.settings import ReplicaSettings
from configs.layout import LayoutConfig
from storage.objects import Store
from tests.cells.replica.conftest import MakeFolder, seal_group

LIMIT_S = 250
TOKEN = "of these ranks"


class Machines(NamedTuple):
    here: str
    there: str
    namespace: str
    """Of the one that is not here."""


@pytest.fixture
def machines() -> Iterator[Machines]:
    number = os.getpid() % 10_000
    namespace, link = f"gyre-ranks-{number}", f"gyrer{number}"
    subnet = f"10.78.{number % 250}"
    found = Machines(f"{subnet}.1", f"{subnet}.2", namespace)
    ip("netns", "add", namespace)
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("address", "add", f"{found.here}/24", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", namespace, "address", "add", f"{found.there}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        yield found
    finally:
        ip("netns", "delete", namespace)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=60)


def settings_of(root: Path, sizes: dict[str, Any], **more: Any) -> ReplicaSettings:
    return ReplicaSettings(
        root=str(root),
        core=True,
        layout=LayoutConfig(**sizes),
        objective="tests.cells.replica.losses:SequenceRatio",
        **more,
    )


def start_far_rank(machines: Machines, meeting: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", machines.namespace),
            *(sys.executable, "-m", "cells.replica.worker", "--join", meeting),
            *("--rank", "1", "--address", machines.there),
        ],
        env={**os.environ, TOKEN_VARIABLE: TOKEN},
        start_new_session=True,
    )


async def train(client: ReplicaClient, folder: Path, out: Path) -> dict[str, Any]:
    """One update of three samples, exported to ``out``."""
    await client.call("load", {"path": str(folder), "version": 0}, LIMIT_S)
    samples = [{"group_key": "g0", "index": index} for index in range(3)]
    args = {"step": 0, "update": 0, "micro_step": "m", "samples": samples}
    done = await client.call("micro_step", args, LIMIT_S)
    args = {"step": 0, "update": 0, "executions": 3, "learning_rate": 1e-2}
    stepped = await client.call("step", args, LIMIT_S)
    await client.call("export", {"path": str(out)}, LIMIT_S)
    stats = {name: value for name, value in done["stats"].items() if name != "seconds"}
    return {**stats, "grad_norm": stepped["grad_norm"]}


async def call_until_dead(replica: ReplicaClient) -> None:
    """The leader may still say that a rank ended, before it ends for that."""
    while True:
        try:
            await replica.call("status", limit_s=60)
        except ReplicaRefusedError as refused:
            assert "a rank ended" in str(refused)


@pytest.mark.real
@pytest.mark.timeout(600)
async def test_two_machines_compute_what_one_process_does_and_die_together(
    machines: Machines, model_folder: MakeFolder, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    seal_group(Store(root), "g0", 0)
    folder = model_folder("qwen3")
    one = await ReplicaClient.start(
        settings_of(root, {}), log=tmp_path / "one.log", limit_s=LIMIT_S
    )
    try:
        expected = await train(one, folder, tmp_path / "one")
    finally:
        await one.close()

    meeting = f"{machines.here}:{free_port(machines.here)}"
    settings = settings_of(
        root, {"tensor": 2}, nodes=2, meeting=meeting, transfer_host=machines.here
    )
    starting = asyncio.create_task(
        ReplicaClient.start(settings, log=tmp_path / "two.log", limit_s=LIMIT_S, ranks_token=TOKEN)
    )
    far = start_far_rank(machines, meeting)
    try:
        two = await starting
        try:
            assert await train(two, folder, tmp_path / "two") == pytest.approx(expected, rel=1e-5)
            published = await two.call("publish")
            hosts = [block["peer"].split(":")[0] for block in published["descriptor"]["ranks"]]
            assert hosts == [machines.here, machines.there], "each machine's part is read there"
            await asyncio.to_thread(end_group, far.pid, 2)
            with pytest.raises(ReplicaDeadError):
                await asyncio.wait_for(call_until_dead(two), 60)
        finally:
            await two.close()
    finally:
        await asyncio.to_thread(end_group, far.pid, 2)
    before, alone, shared = (
        load_file(path / "model.safetensors")
        for path in (folder, tmp_path / "one", tmp_path / "two")
    )
    assert alone.keys() == shared.keys()
    for name, weight in alone.items():
        changed = float((weight - before[name]).norm())
        assert float((weight - shared[name]).norm()) < 1e-3 * changed, name


def test_a_stranger_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another secret, a rank that is not missing, nonsense, and too much of it."""
    meeting = f"127.0.0.1:{free_port()}"
    settings = settings_of(tmp_path, {"data": 2}, nodes=2, meeting=meeting, ranks_limit_s=30)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ReplicaError, match="need a secret in GYRE_RANKS_TOKEN"):
        Meeting(settings, tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    leader = Meeting(settings, tmp_path)
    wrong = [join(meeting, 2, 5), join(meeting, 0, 5)]
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    wrong.append(join(meeting, 1, 5))
    for words in (b"GET / HTTP/1.1\r\n\r\n", pack_frame({"rank": 1, "token": "x" * 5000})):
        wrong.append(join(meeting, 1, 5))
        wrong[-1].sendall(words)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    right = join(meeting, 1, 5)
    [admitted] = leader.admit("127.0.0.1:1")
    welcome = welcomed(right, 5)
    assert (welcome.settings, welcome.store) == (settings, "127.0.0.1:1")
    for stream in wrong:
        with pytest.raises((ReplicaError, ConnectionError)):
            welcomed(stream, 5)
        stream.close()
    right.close()
    assert receive_frame(admitted) is None
    admitted.close()


def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    meeting = f"127.0.0.1:{free_port()}"
    settings = settings_of(tmp_path, {"data": 4}, nodes=2, meeting=meeting, ranks_limit_s=0.2)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2, 3\] did not come"):
        Meeting(settings, tmp_path).admit("x")


async def test_ranks_without_a_leader_tell_so(tmp_path: Path) -> None:
    ranks = NodeRanks.start(
        node=1,
        ranks=2,
        meeting=f"127.0.0.1:{free_port()}",
        address="127.0.0.1",
        token=TOKEN,
        log=tmp_path / "log",
        limit_s=0.1,
    )
    try:
        for process in ranks.processes.values():
            await asyncio.to_thread(process.wait, 60)
        found = ranks.failure()
    finally:
        await ranks.close()
    assert "rank" in found and "no leader at 127.0.0.1" in found


@pytest.mark.parametrize(
    ("sizes", "more", "expected"),
    [
        ({"tensor": 2}, {"nodes": 3, "meeting": "a:1"}, "2 ranks can't be shared out evenly"),
        ({"tensor": 2}, {"nodes": 2}, "need an address to meet at"),
        ({"tensor": 2}, {"nodes": 2, "meeting": "nowhere"}, "pattern"),
    ],
)
def test_machines_that_do_not_fit_are_refused(
    tmp_path: Path, sizes: dict[str, int], more: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected):
        settings_of(tmp_path, sizes, **more)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ReplicaError, match=r"203\.0\.113\.1 is the address of no interface"):
        use_interface_of("203.0.113.1")
