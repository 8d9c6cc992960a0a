"""The gateway may refuse, vanish and come back elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cells.daemon import Registration
from storage.layout import RunLayout
from storage.objects import Store
from tasks.rollout import sessions as module
from tasks.rollout.sessions import Endpoint, GatewayError, GatewaySessions, Usage
from tests.tasks.rollout.stub_gateway import StubGateway

LAYOUT = RunLayout("r")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest_asyncio.fixture
async def sessions(store: Store, gateway: StubGateway) -> AsyncIterator[GatewaySessions]:
    gateway.register(store, LAYOUT)
    found = GatewaySessions(store, LAYOUT, patience_s=10)
    yield found
    await found.close_client()


async def test_a_session(sessions: GatewaySessions, gateway: StubGateway) -> None:
    assert await sessions.open("e1", 1.0, 0) == Endpoint(gateway.base_url("e1"), "key-e1")
    gateway.usage["e1"] = 3
    gateway.waited_s = lambda: 1.5
    assert await sessions.usage("e1") == Usage(3, 1.5)
    assert await sessions.close("e1") == Usage(3, 1.5)
    assert await sessions.close("e1") == Usage(3, 1.5)


async def test_forgetting_what_the_gateway_does_not_know(
    sessions: GatewaySessions, gateway: StubGateway
) -> None:
    await sessions.forget("unknown")
    assert gateway.closed == []
    with pytest.raises(GatewayError, match="404"):
        await sessions.close("unknown")


async def test_a_gateway_that_is_started_again_elsewhere(
    sessions: GatewaySessions, gateway: StubGateway, store: Store
) -> None:
    await sessions.open("e1", 1.0, 0)
    gateway.close()
    closing = asyncio.create_task(sessions.close("e1"))
    other = StubGateway()
    try:
        other.register(store, LAYOUT)
        assert (await closing).calls == 0
        assert (other.opened, other.closed) == (["e1"], ["e1"])  # opened again, as it is unknown
    finally:
        other.close()


async def test_open_sessions_are_opened_at_a_new_gateway(
    sessions: GatewaySessions,
    gateway: StubGateway,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.02)
    await sessions.open("e1", 1.0, 0)
    await sessions.open("e2", 1.0, 0)
    await sessions.close("e2")
    watching = asyncio.create_task(sessions.watch())
    try:
        await asyncio.to_thread(gateway.checked.wait, 20)
        gateway.opened.clear()
        gateway.reopened.clear()
        gateway.incarnation = "another"
        assert await asyncio.to_thread(gateway.reopened.wait, 20)
        assert set(gateway.opened) == {"e1"}
    finally:
        watching.cancel()


async def test_patience_ends(sessions: GatewaySessions, gateway: StubGateway) -> None:
    sessions.patience_s = 0.2
    gateway.admin_down = True
    with pytest.raises(GatewayError, match="503"):
        await sessions.open("e1", 1.0, 0)


async def test_a_new_token_is_looked_up(
    sessions: GatewaySessions, gateway: StubGateway, store: Store
) -> None:
    right = store.read_record(LAYOUT.host("gateway"), Registration)
    wrong = right.model_copy(update={"token": "old"})
    store.write_record(LAYOUT.host("gateway"), wrong)
    opening = asyncio.create_task(sessions.open("e1", 1.0, 0))
    await asyncio.to_thread(gateway.refused.wait, 20)
    store.write_record(LAYOUT.host("gateway"), right)
    assert (await opening).api_key == "key-e1"
