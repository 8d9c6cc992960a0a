"""The HTTP calls of a cell host, on fake processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cells.daemon import Daemon
from cells.host.api import BODY_LIMIT_BYTES, HostApi
from cells.serving.engine import EngineLateError
from tests.cells.host.fakes import FakeCell


class Client:
    """Calls with the daemon's token."""

    def __init__(self, fake: FakeCell, daemon: Daemon) -> None:
        self.fake = fake
        transport = httpx.ASGITransport(app=daemon.app)
        headers = {"authorization": f"Bearer {daemon.token}"}
        self.http = httpx.AsyncClient(transport=transport, base_url="http://host", headers=headers)

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        response = await self.http.post(path, json=body)
        return response.status_code, response.json()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    fake = FakeCell(tmp_path)
    await fake.cell.start()
    api = HostApi(fake.cell)
    daemon = Daemon(
        name="cell-a", kind="cell", lease_s=60, routes=api.routes(), close=fake.cell.close
    )
    api.serve_for(daemon)
    client = Client(fake, daemon)
    async with client.http:
        yield client


async def test_status_has_what_the_manager_reads(client: Client) -> None:
    status = (await client.http.get("/status", params={"cpu": 1})).json()
    assert status["cell"] == "a"
    assert (status["role"], status["epoch"], status["detail"]) == ("rollout", 0, "")
    assert status["engine"]["version"] == status["replica"]["version"] == 0
    assert status["engine"]["token"] == "engine-key"
    assert status["engine"]["cpu_s"] > 0
    assert status["replica"]["state"] == "asleep"
    assert status["switches"] == []
    assert set(status["mooncake"].values()) == {0}


async def test_commands_and_their_refusals(client: Client) -> None:
    code, answer = await client.post("/replica/micro_step", epoch=1, args={})
    assert (code, "needs role training" in answer["error"]) == (422, True)
    code, status = await client.post("/role", epoch=2, role="training")
    assert (code, status["role"], status["epoch"]) == (200, "training", 2)
    assert status["switches"][0]["to"] == "training"
    assert (await client.post("/replica/step", epoch=2, args={}))[1]["version"] == 1
    code, answer = await client.post("/role", epoch=1, role="rollout")
    assert (code, answer["error"]) == (409, "cell a: epoch 1 is older than 2")
    assert (await client.post("/replica/exec", epoch=2, args={}))[0] == 404
    assert (await client.post("/engine/version", epoch=2, version=7))[0] == 422
    assert (await client.post("/role", epoch=2, role="rollout", version=1))[1]["role"] == "rollout"
    client.fake.engine.refuse["drain"] = EngineLateError("no answer within 10 s")
    assert (await client.post("/role", epoch=2, role="training"))[0] == 504


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/role", {"role": "training"}),
        ("/role", {"epoch": 1, "role": "failed"}),
        ("/role", {"epoch": 1, "role": "rollout", "version": -1}),
        ("/role", {"epoch": "1", "role": "rollout"}),
        ("/engine/version", {"epoch": 1}),
        ("/replica/status", {"epoch": 1, "args": []}),
        ("/replica/status", {"epoch": 1, "more": 1}),
    ],
)
async def test_bodies_are_checked(client: Client, path: str, body: dict[str, Any]) -> None:
    code, answer = await client.post(path, **body)
    assert code == 400
    assert answer["error"].startswith("cell a: ")


async def test_the_token_is_needed_everywhere(client: Client) -> None:
    client.http.headers["authorization"] = "Bearer wrong"
    assert (await client.http.get("/status")).status_code == 401
    for path in ("/role", "/engine/version", "/replica/status", "/lease", "/stop"):
        assert (await client.post(path, epoch=9))[0] == 401
    assert client.fake.cell.fence.epoch == 0


async def test_large_and_broken_bodies(client: Client) -> None:
    response = await client.http.post("/replica/status", content=b"x" * (BODY_LIMIT_BYTES + 1))
    assert response.status_code == 413
    assert (await client.http.post("/role", content=b"{")).status_code == 400
