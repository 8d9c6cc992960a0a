"""Slow and dead links between the parts: answers come late, deadlines hold, nothing is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cells.client import DaemonClient, DaemonError
from cells.launch import LeaseKeeper, ensure_daemons, stop_daemons
from storage.journal import Journal, read_journal
from storage.objects import Store
from storage.run import Run
from tests.cells.gateway.test_reroute import assert_whole
from tests.chaos.daemons import LIMIT_S, spec
from tests.chaos.links import link_to

HELLO = [{"role": "user", "content": "hello"}]


async def test_an_engine_behind_a_slow_link_answers_late_and_holds_up_nobody(
    bench: Any, engine: Any, other: Any, script: Any, say: Any
) -> None:
    with link_to(engine.url) as (link, url):
        far = SimpleNamespace(url=url, version=engine.version)
        await bench.cell("far", far, capacity=1)
        slow = await bench.open("e1")
        ids = say("a long enough answer")
        script.say(ids)
        script.say(ids)  # whoever asks first
        link.stalled = True
        late = asyncio.create_task(slow.chat(HELLO))
        while not link.connections:  # noqa: ASYNC110 - counted in another thread
            await asyncio.sleep(0.01)
        await bench.cell("near", other)
        quick = await bench.open("e2")
        assert (await quick.chat(HELLO)).status_code == 200
        assert not late.done()
        link.delay_s, link.bytes_per_s = 0.3, 20_000
        link.stalled = False
        assert (await late).status_code == 200
        (recorded,) = bench.calls("e1")
        assert recorded.cell == "far"
        assert_whole(recorded, bench, ids)
        assert len(engine.requests) == 1, "late is not lost: it was not asked again"


async def test_a_cell_behind_a_dead_link_leaves_and_its_work_goes_on_elsewhere(
    bench: Any, engine: Any, other: Any, script: Any, say: Any
) -> None:
    """The link dies without a word: no connection is reset. The manager takes the cell out."""
    with link_to(engine.url) as (link, url):
        far = SimpleNamespace(url=url, version=engine.version)
        await bench.cell("far", far)
        execution = await bench.open()
        ids = say("a long enough answer")
        script.say(ids)
        link.stalled = True
        call = asyncio.create_task(execution.chat(HELLO))
        await bench.until(lambda state: state["cells"]["far"]["in_flight"] == 1)
        await bench.cell("near", other)
        await bench.cell("far", far, state="leaving")
        assert (await call).status_code == 200
        (recorded,) = bench.calls()
        assert recorded.cell == "near"
        assert_whole(recorded, bench, ids)


@pytest.fixture
def daemon(run_store: Run) -> Iterator[DaemonClient]:
    run = run_store
    with closing(LeaseKeeper(60)) as keeper:
        client = ensure_daemons(run.store, run.layout, [spec()], keeper, lambda _: None)["small"]
        yield client
        stop_daemons([client], 15)


def test_a_daemon_behind_a_slow_link_is_heard_and_one_behind_a_dead_link_is_an_error(
    daemon: DaemonClient,
) -> None:
    with link_to(daemon.url) as (link, url):
        far = DaemonClient(daemon.registration.model_copy(update={"url": url}))
        link.delay_s = 0.4
        assert far.call("GET", "/healthz", limit_s=LIMIT_S)["name"] == "small"
        link.stalled = True
        with pytest.raises(DaemonError, match="small: GET /healthz: no answer in 1 s"):
            far.call("GET", "/healthz", limit_s=1)
        assert daemon.call("GET", "/healthz", limit_s=LIMIT_S)["name"] == "small"
        link.stalled = False
        assert far.call("POST", "/lease", limit_s=LIMIT_S)["lease_left_s"] > 0
        far.close()


def test_a_store_behind_a_slow_link_loses_nothing(
    failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with link_to(os.environ["AWS_ENDPOINT_URL"]) as (link, url):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        link.delay_s, link.bytes_per_s = 0.05, 200_000
        store = Store(f"s3://failing/{failing.root}")
        store.write("object", b"x" * 50_000)
        journal = Journal(store, "calls")
        for line in (b"one", b"two"):
            journal.append([line])
        journal.close()
        assert link.connections
        assert store.read("object") == b"x" * 50_000
        assert read_journal(store, "calls") == [b"one", b"two"]


_TRANSFER = """
import sys
from pathlib import Path
import torch
from cells.transfer.endpoint import Endpoint
from cells.transfer.errors import TransferTimeoutError
from tests.cells.transfer.test_endpoint import Peer

FLOATS = 500_000  # two megabytes
source = Peer(FLOATS)
endpoint = Endpoint()
try:
    endpoint.read(source.descriptor, limit_s=0.2)
    sys.exit("too fast for a slow link")
except TransferTimeoutError as error:
    print(error)
found = endpoint.read(source.descriptor, limit_s=120).view(torch.float32)
assert torch.equal(found, torch.arange(FLOATS, dtype=torch.float32))
source.end()
print("whole")
"""


@pytest.mark.real
@pytest.mark.long
def test_a_transfer_over_a_slow_link_takes_its_time_or_ends_at_its_deadline() -> None:
    """Mooncake in a network namespace whose loopback passes 16 megabits a second."""
    name = f"gyre{os.getpid() % 10_000}s"
    shaping = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf"]
    commands = (
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "set", "lo", "mtu", "1500", "up"],
        ["ip", "netns", "exec", name, *shaping, "rate", "16mbit", "burst", "32k", "limit", "1m"],
    )
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=LIMIT_S)
        done = subprocess.run(
            ["ip", "netns", "exec", name, sys.executable, "-c", _TRANSFER],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=Path(__file__).parents[2],
        )
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "whole" and "not complete in time" in done.stdout
