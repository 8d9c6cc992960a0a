"""What a leader hears of its cell's further machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from cells.daemon import Registration
from cells.host import nodes as module
from cells.host.nodes import Nodes, NodesError, agent_daemon
from cells.serving.flags import EngineSettings
from configs.cells import CellConfig, Device
from storage.run import Run

CELL = CellConfig(name="a", core=True, address="10.0.0.1", nodes=("10.0.0.2",))
LIMIT_S = 20


class FakeAgent:
    """Answers as an agent does, and remembers what it was told."""

    def __init__(self) -> None:
        self.failure = ""
        self.told: list[tuple[str, Any]] = []
        app = web.Application()
        app.router.add_get("/healthz", self._answer)
        app.router.add_get("/status", self._answer)
        app.router.add_post("/start", self._take)
        app.router.add_post("/end", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self, run: Run) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        name = agent_daemon("a", 1)
        registration = Registration(
            name=name,
            kind="agent",
            url=f"http://{host}:{port}",
            token="t",
            machine="m",
            pid=1,
            incarnation="i",
            started_at=0,
        )
        run.store.write_record(run.layout.host(name), registration)

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.json_response({"failure": self.failure, "incarnation": "i"})

    async def _take(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.told.append((request.path, await request.json() if text else None))
        return web.json_response({})


@pytest.fixture
async def agent(run_store: Run) -> AsyncIterator[FakeAgent]:
    made = FakeAgent()
    await made.start(run_store)
    yield made
    await made.stop()


@pytest.fixture
async def nodes(
    run_store: Run, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Nodes]:
    """A cell's nodes, started, that look often and have little patience."""
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    monkeypatch.setattr(module, "SILENCE_S", 0.1)
    made = Nodes(run_store, CELL, "10.0.0.1:4711")
    await made.start(engine(run_store), LIMIT_S)
    yield made
    await made.close()


def engine(run: Run) -> EngineSettings:
    return EngineSettings(
        policy=run.store.local_path("policy"),
        version=3,
        device=Device.CPU,
        context=100,
        kv_tokens=1000,
        requests=4,
        seed=1,
        port=7000,
        admin_key="k",
        gpus=2,
        nodes=2,
        meeting="10.0.0.1:4712",
    )


async def heard(nodes: Nodes) -> str:
    async with asyncio.timeout(LIMIT_S):
        while not nodes.failure():  # noqa: ASYNC110  (it is another's)
            await asyncio.sleep(0.01)
    return nodes.failure()


async def test_an_agent_is_told_all_it_needs_and_in_the_end_to_end_it(
    nodes: Nodes, agent: FakeAgent, run_store: Run
) -> None:
    ((path, body),) = agent.told
    assert path == "/start"
    part = module.Part.model_validate(body)
    assert part == module.Part(
        meeting="10.0.0.1:4711", ranks_token=nodes.ranks_token, engine=engine(run_store)
    )
    assert nodes.failure() == ""
    await nodes.close()
    assert [path for path, _ in agent.told] == ["/start", "/end"]


async def test_what_ended_there_is_told_with_its_machine(nodes: Nodes, agent: FakeAgent) -> None:
    agent.failure = "rank 1 was killed (SIGKILL)"
    assert await heard(nodes) == "agent-a-1: rank 1 was killed (SIGKILL)"


async def test_a_machine_that_is_silent_is_lost(nodes: Nodes, agent: FakeAgent) -> None:
    await agent.stop()
    assert "agent-a-1: does not answer" in await heard(nodes)


async def test_an_agent_that_does_not_come_is_told_with_its_command(run_store: Run) -> None:
    nodes = Nodes(run_store, CELL, "10.0.0.1:4711")
    with pytest.raises(NodesError, match=f"`gyre host {run_store.run_id} a --node 1`"):
        await nodes.start(engine(run_store), 0.1)
