"""What passes an execution's door, and what is known of a gateway that fails."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from tasks.rollout.door import Door, loopback_listener, make_client
from tasks.rollout.sessions import Endpoint

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def fine(request: web.BaseRequest) -> web.StreamResponse:
    return web.json_response({"path": request.raw_path})


@dataclass
class Upstream:
    """A gateway whose answers are changed while it runs."""

    handler: Handler = fine
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((f"{request.method} {request.raw_path}", headers, await request.read()))
        try:
            return await self.handler(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise


@dataclass(frozen=True)
class Doorway:
    door: Door
    upstream: Upstream
    server: asyncio.Server
    url: str


@pytest_asyncio.fixture
async def doorway() -> AsyncIterator[Doorway]:
    upstream = Upstream()
    serving = web.Server(upstream, handler_cancellation=True)
    server = await asyncio.get_running_loop().create_server(serving, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = make_client()
    door = Door(Endpoint(f"http://127.0.0.1:{port}/e/one/v1", "right"), client)
    listener = loopback_listener()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await door.open(listener)
    yield Doorway(door, upstream, server, url)
    await door.close()
    await client.close()
    server.close()
    await serving.shutdown(0)


async def test_requests_reach_only_their_own_execution(doorway: Doorway) -> None:
    headers = {"authorization": "Bearer wrong", "x-api-key": "wrong", "x-agent": "main"}
    async with aiohttp.ClientSession() as http:
        async with http.post(
            f"{doorway.url}/v1/chat/completions?a=1", data=b"{}", headers=headers
        ) as answer:
            assert await answer.json() == {"path": "/e/one/v1/chat/completions?a=1"}
        for path in (
            "/",
            "/v1",
            "/v1/",
            "/admin/state",
            "/v1//x",
            "/v1/.hidden",
            "/e/two/v1/models",
        ):
            async with http.get(doorway.url + path) as answer:
                assert answer.status == 404
    ((request, seen, body),) = doorway.upstream.seen
    assert (request, body) == ("POST /e/one/v1/chat/completions?a=1", b"{}")
    assert seen["authorization"] == "Bearer right"
    assert seen["x-agent"] == "main" and "x-api-key" not in seen


async def test_a_stream_passes_piece_by_piece(doorway: Doorway) -> None:
    """Each piece is read before the next one is sent."""
    more = asyncio.Event()

    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await response.write(b"data: %d\n\n" % number)
            await more.wait()
            more.clear()
        return response

    doorway.upstream.handler = stream
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{doorway.url}/v1/chat/completions", data=b"{}") as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        for number in range(3):
            assert await answer.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
            assert doorway.door.quiet_s(asyncio.get_running_loop().time()) == 0.0
            more.set()
        assert await answer.content.read() == b""
    assert doorway.door.problem == ""


async def test_a_caller_that_goes_away_ends_its_call(doorway: Doorway) -> None:
    began = asyncio.Event()

    async def never(request: web.BaseRequest) -> web.StreamResponse:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    doorway.upstream.handler = never
    port = int(doorway.url.rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    await asyncio.wait_for(began.wait(), 20)
    writer.close()
    await asyncio.wait_for(doorway.upstream.gone.wait(), 20)
    assert doorway.door.problem == ""


@pytest.mark.parametrize(
    ("status", "ours"),
    [
        *((status, False) for status in (200, 400, 404, 413, 429, 500)),
        *((status, True) for status in (401, 502, 503, 504)),
    ],
)
async def test_what_the_gateway_failed_at(doorway: Doorway, status: int, ours: bool) -> None:
    async def answer_with(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({}, status=status)

    doorway.upstream.handler = answer_with
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{doorway.url}/v1/models") as answer:
            assert answer.status == status
        assert bool(doorway.door.problem) == ours
        doorway.upstream.handler = fine
        async with http.get(f"{doorway.url}/v1/models") as answer:
            assert answer.status == 200
    assert doorway.door.problem == ""


async def test_a_gateway_that_is_gone(doorway: Doorway) -> None:
    endpoint = Endpoint(f"http://127.0.0.1:{_closed_port()}/v1", "right")
    client = make_client()
    door = Door(endpoint, client)
    listener = loopback_listener()
    await door.open(listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models"
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            assert answer.status == 502
        assert "can't be reached" in door.problem
    finally:
        await door.close()
        await client.close()


def _closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
