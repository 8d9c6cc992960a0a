"""Connections to engines: what they carry, when they are kept, and how they fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from cells.gateway import wire as wire_module
from cells.gateway.wire import Wire

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LIMIT_S = 20


class Server:
    """Reads requests and writes what it is told to, part by part."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [PLAIN]
        self.connections = 0
        self.requests: list[bytes] = []
        self.then_close = False
        self.url = ""
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for part in self.parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.then_close:
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    made = Server()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    made.url = f"http://{host}:{port}"
    try:
        async with asyncio.timeout(LIMIT_S):
            yield made
    finally:
        for writer in made.writers:
            writer.close()
        server.close()


async def ask(wire: Wire, server: Server, body: bytes = b"{}") -> tuple[int, bytes, bytes]:
    got: list[bytes] = []
    status, said = await wire.post(server.url, "/generate", "secret", [body], got.append)
    return status, said, b"".join(got)


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with serving() as server:
        wire = Wire()
        for body in (b'{"a":1}', b'{"b":2}'):
            assert await ask(wire, server, body) == (200, b"", b"hello")
        assert server.connections == 1
        head, _, sent = server.requests[1].partition(b"\r\n\r\n")
        assert sent == b'{"b":2}'
        assert head.startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"authorization: Bearer secret" in head
        wire.close()


async def test_a_body_in_many_parts_arrives_in_order() -> None:
    async with serving() as server:
        body = [b"%d," % number * (1 + number % 300) for number in range(5000)]
        wire = Wire()
        status, _ = await wire.post(server.url, "/generate", None, body, lambda data: None)
        assert status == 200
        assert server.requests[0].partition(b"\r\n\r\n")[2] == b"".join(body)
        wire.close()


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_chunks_arrive_whole_however_they_are_cut(size: int) -> None:
    async with serving() as server:
        answer = CHUNKED + b"5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
        server.parts = [answer[at : at + size] for at in range(0, len(answer), size)]
        wire = Wire()
        assert await ask(wire, server) == (200, b"", b"hello, world")
        assert await ask(wire, server) == (200, b"", b"hello, world")
        assert server.connections == 1
        wire.close()


async def test_an_error_is_given_back_and_not_handed_over() -> None:
    async with serving() as server:
        server.parts = [b"HTTP/1.1 500 Oh\r\ncontent-length: 2000\r\n\r\n", b"x" * 2000]
        status, said, got = await ask(Wire(), server)
        assert (status, said, got) == (500, b"x" * 500, b"")


@pytest.mark.parametrize(
    "parts",
    [[], [CHUNKED + b"5\r\nhel"], [PLAIN[:-1]], [b"HTTP/1.1 200 OK\r\n\r\nwithout a length"]],
    ids=["nothing", "inside a chunk", "short", "no length"],
)
async def test_an_answer_that_breaks_off_is_an_error(parts: list[bytes]) -> None:
    async with serving() as server:
        server.parts, server.then_close = parts, True
        with pytest.raises(OSError):
            await ask(Wire(), server)


async def test_what_is_no_http_is_an_error() -> None:
    async with serving() as server:
        server.parts = [b"hello, I am a mail server\r\n"]
        with pytest.raises(ValueError, match="no HTTP"):
            await ask(Wire(), server)


async def test_what_the_taker_raises_reaches_the_asker() -> None:
    def take(data: bytes) -> None:
        raise KeyError("meta_info")

    async with serving() as server:
        with pytest.raises(KeyError):
            await Wire().post(server.url, "/generate", None, [b"{}"], take)


async def _until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110  (it is the transport's)
        await asyncio.sleep(0.01)


async def test_a_connection_that_its_server_closed_or_asked_to_close_is_not_used_again() -> None:
    async with serving() as server:
        wire = Wire()
        server.parts = [PLAIN.replace(b"content", b"connection: close\r\ncontent")]
        await ask(wire, server)
        await ask(wire, server)
        assert server.connections == 2
        server.parts = [PLAIN]
        await ask(wire, server)
        server.writers[-1].close()
        await _until(lambda: not any(wire._idle.values()))
        assert await ask(wire, server) == (200, b"", b"hello")
        wire.close()


async def test_who_stops_waiting_closes_the_connection() -> None:
    async with serving() as server:
        server.parts = [CHUNKED]
        asking = asyncio.create_task(ask(Wire(), server))
        await _until(lambda: bool(server.requests))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await _until(lambda: server.writers[0].is_closing())


async def test_nobody_there() -> None:
    async with serving() as server:
        url = server.url
    with pytest.raises(OSError):
        await Wire().post(url, "/generate", None, [b"{}"], lambda data: None)


async def test_a_loop_that_is_behind_does_not_blame_the_server(monkeypatch) -> None:
    monkeypatch.setattr(wire_module, "CONNECT_LIMIT_S", 0.02)
    async with serving() as server:
        wire = Wire()
        asking = asyncio.create_task(ask(wire, server))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251  (this is what is tested)
        assert await asking == (200, b"", b"hello")
        wire.close()
