"""Real replica processes that exchange gradients and weights through a real Mooncake."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cells.replica.client import (
    ReplicaClient,
    ReplicaDeadError,
    ReplicaDeadlineError,
    ReplicaRefusedError,
)
from cells.replica.settings import ReplicaSettings
from storage.objects import Store
from tests.cells.replica.conftest import seal_group

pytestmark = pytest.mark.real
START_LIMIT_S = 200
REPOSITORY = Path(__file__).parents[3]
WORK = {"m0": [("g0", 0), ("g1", 1)], "m1": [("g1", 2)], "m2": [("g0", 2), ("g1", 0)]}
Start = Callable[..., Awaitable[ReplicaClient]]


@pytest.fixture
async def start(
    tmp_path: Path, hf_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Starts replicas over one store; all are ended afterwards."""
    monkeypatch.chdir(REPOSITORY)
    store = Store(tmp_path / "store")
    for seed in range(2):
        seal_group(store, f"g{seed}", seed)
    clients: list[ReplicaClient] = []

    async def make(*, core: bool) -> ReplicaClient:
        settings = ReplicaSettings(
            root=str(tmp_path / "store"),
            core=core,
            objective="tests.cells.replica.losses:SequenceRatio",
            transfer_limit_s=10,
        )
        log = tmp_path / f"replica-{len(clients)}.log"
        client = await ReplicaClient.start(settings, log=log, limit_s=START_LIMIT_S)
        clients.append(client)
        await client.call("load", {"path": str(hf_folder(tied=True)), "version": 0})
        return client

    yield make
    for client in clients:
        await client.close()
        assert client.process.returncode is not None


async def work(client: ReplicaClient, name: str, update: int = 0) -> dict[str, Any]:
    samples = [{"group_key": key, "index": index} for key, index in WORK[name]]
    args = {"step": 0, "update": update, "micro_step": name, "samples": samples}
    return await client.call("micro_step", args)


async def step(client: ReplicaClient, update: int = 0) -> dict[str, Any]:
    args = {"step": 0, "update": update, "executions": 5, "learning_rate": 1e-2}
    return await client.call("step", args)


async def test_streamed_over_two_processes_equals_one(
    start: Start, hf_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Core and satellite share an update; a second satellite dies with its share in hand."""
    core, lost = await asyncio.gather(start(core=True), start(core=False))
    for name in WORK:
        await work(core, name)
    alone = await step(core)
    samples = [{"group_key": "g0", "index": index} for index in range(3)]
    expected = await core.call("logprobs", {"samples": samples})

    status = await core.call("status")
    assert (status["version"], status["last_step"]) == (1, alone)
    hf = await core.call("export", {"path": str(tmp_path / "one")})
    assert hf == {"version": 1}

    # The same update again, from the same weights, with work that moves between processes.
    await core.call("load", {"path": str(hf_folder(tied=True)), "version": 0})
    await lost.call("pull", await core.call("publish"))
    await work(core, "m0")
    await work(lost, "m1")
    frozen = await lost.call("freeze", {"update": 0})
    lost.process.send_signal(signal.SIGKILL)
    with pytest.raises(ReplicaRefusedError) as caught:
        await core.call("reduce", {"update": 0, **frozen}, 30)
    assert caught.value.kind in {"TransferError", "TransferTimeoutError"}
    assert (await core.call("status"))["micro_steps"] == ["m0"], "nothing of the dead one came in"
    with pytest.raises(ReplicaDeadError):
        await lost.call("status")

    satellite = await start(core=False)
    published = await core.call("publish")
    pulled = await satellite.call("pull", published)
    assert (pulled["version"], pulled["bytes"]) == (0, published["descriptor"]["nbytes"])
    for name in ("m1", "m2"):
        await work(satellite, name)
    frozen = await satellite.call("freeze", {"update": 0})
    assert frozen["micro_steps"] == ["m1", "m2"]

    wrong = {**frozen["descriptor"], "checksum": frozen["descriptor"]["checksum"] ^ 1}
    with pytest.raises(ReplicaRefusedError) as caught:
        await core.call("reduce", {"update": 0, **frozen, "descriptor": wrong}, 30)
    assert caught.value.kind == "StaleBlockError"
    assert (await core.call("status"))["micro_steps"] == ["m0"]

    await core.call("reduce", {"update": 0, **frozen}, 30)
    await core.call("reduce", {"update": 0, **frozen}, 30)
    await satellite.call("release", {"update": 0})
    shared = await step(core)
    assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    found = await core.call("logprobs", {"samples": samples})
    assert found["gap_mean"] == pytest.approx(expected["gap_mean"], rel=1e-6)

    # The satellite's old weights are version 0, and what it was told of is gone.
    with pytest.raises(ReplicaRefusedError, match="no micro-steps"):
        await step(core, update=1)
    pulled = await satellite.call("pull", await core.call("publish"))
    assert pulled["version"] == 1
    assert await satellite.call("logprobs", {"samples": samples}) == found


async def test_deadlines_order_errors_and_death(start: Start, tmp_path: Path) -> None:
    core = await start(core=True)
    # A command that nobody waits for any more is carried out before the next one.
    core.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ReplicaDeadlineError, match="no answer within"):
        await core.call(
            "micro_step",
            {
                "step": 0,
                "update": 0,
                "micro_step": "m0",
                "samples": [{"group_key": "g0", "index": 0}],
            },
            limit_s=0.2,
        )
    core.process.send_signal(signal.SIGCONT)
    assert (await core.call("status"))["micro_steps"] == ["m0"]

    with pytest.raises(ReplicaRefusedError, match="unknown command") as caught:
        await core.call("fly")
    assert caught.value.kind == "ReplicaError"
    with pytest.raises(ReplicaRefusedError, match="g9"):
        args = {"group_key": "g9", "index": 0}
        await core.call("logprobs", {"samples": [args]})
    assert (await core.call("status"))["micro_steps"] == ["m0"], "the replica lives on"

    answers = await asyncio.gather(*(core.call("status") for _ in range(20)))
    assert all(answer == answers[0] for answer in answers)

    waiting = asyncio.create_task(core.call("export", {"path": str(tmp_path / "never")}))
    core.process.send_signal(signal.SIGKILL)
    with pytest.raises(ReplicaDeadError):
        for _ in range(1000):
            await core.call("status")
    await asyncio.wait([waiting], timeout=10)
    assert waiting.done()
    assert not core.alive


async def test_a_worker_that_can_not_start_says_why(tmp_path: Path) -> None:
    settings = ReplicaSettings(root=str(tmp_path), core=True, objective="no.such.module:Loss")
    with pytest.raises(ReplicaDeadError, match=r"no\.such\.module:Loss"):
        await ReplicaClient.start(settings, log=tmp_path / "log", limit_s=START_LIMIT_S)


def test_a_worker_ends_with_its_owner(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from cells.replica.client import ReplicaClient\n"
        "from cells.replica.settings import ReplicaSettings\n"
        "async def main():\n"
        f"    settings = ReplicaSettings(root={str(tmp_path)!r}, core=True,\n"
        "        objective='tests.cells.replica.losses:SequenceRatio')\n"
        f"    client = await ReplicaClient.start(settings, log=Path({str(tmp_path / 'log')!r}),\n"
        f"        limit_s={START_LIMIT_S})\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPOSITORY, env=dict(os.environ)
    )
    try:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
        owner.wait(timeout=10)
        _, alive = psutil.wait_procs([worker], timeout=10)
        # Where the first process of a container collects nobody, an ended one stays a zombie.
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
    finally:
        owner.kill()
        owner.wait(timeout=10)
