"""Requests as they come over a socket: in pieces, in rows, without an end, from old clients."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

import cells.gateway.exchange as exchange
from cells.gateway.public import CHAT
from tests.cells.gateway.conftest import LIMIT_S, Bench, Opened


class Socket:
    """A client that sends what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, bench: Bench) -> Socket:
        place = urlsplit(bench.url)
        return cls(*await asyncio.open_connection(place.hostname, place.port))

    async def answer(self, *, head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """The next answer: its status, headers and body."""
        async with asyncio.timeout(LIMIT_S):
            first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            headers = dict(line.lower().split(": ", 1) for line in lines)
            status = int(first.split(" ")[1])
            if head or status == 100:
                return status, headers, b""
            if "content-length" in headers:
                body = await self._reader.readexactly(int(headers["content-length"]))
                return status, headers, body
            body = b""
            while size := int(await self._reader.readline(), 16):
                body += (await self._reader.readexactly(size + 2))[:-2]
            assert await self._reader.readline() == b"\r\n"
            return status, headers, body

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        async with asyncio.timeout(LIMIT_S):
            return await self._reader.read()


def request(
    opened: Opened,
    body: bytes = b"",
    *,
    method: str = "POST",
    path: str = "chat/completions",
    version: str = "1.1",
    length: int | None = None,
    more: str = "",
) -> bytes:
    target = urlsplit(f"{opened.base_url}/{path}").path
    size = len(body) if length is None else length
    head = f"{method} {target} HTTP/{version}\r\nhost: x\r\nx-api-key: {opened.key}\r\n{more}"
    return f"{head}content-length: {size}\r\n\r\n".encode() + body


def asks(text: str, **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


@pytest.fixture
async def opened(bench, engine) -> Opened:
    await bench.cell("a", engine)
    return await bench.open()


async def test_requests_in_a_row_are_answered_in_their_order(bench, opened, script, say) -> None:
    script.say(say("one"), say("two"))
    client = await Socket.open(bench)
    row = [
        request(opened, asks("first", stream=True)),
        request(opened, method="GET", path="models"),
        request(opened, b"no json"),
        request(opened, asks("second")),
    ]
    client.writer.write(b"".join(row) + b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
    answers = [await client.answer() for _ in range(5)]
    assert [status for status, _, _ in answers] == [200, 200, 400, 200, 200]
    assert b"one" in answers[0][2] and answers[0][2].endswith(b"data: [DONE]\n\n")
    assert json.loads(answers[1][2])["object"] == "list"
    assert json.loads(answers[3][2])["choices"][0]["message"]["content"] == "two"
    assert json.loads(answers[4][2])["openapi"]  # the framework's, on the same connection
    client.writer.close()


async def test_a_request_may_come_in_single_bytes(bench, opened, script, say) -> None:
    script.say(say("one"))
    client = await Socket.open(bench)
    for byte in request(opened, asks("first"), path="chat/%63ompletions?beta=true"):
        client.writer.write(bytes([byte]))
        await client.writer.drain()
        await asyncio.sleep(0)
    status, _, body = await client.answer()
    assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "one"
    client.writer.close()


async def test_who_asks_first_is_told_to_go_on(bench, opened, script, say) -> None:
    script.say(say("one"))
    body = asks("first")
    head = request(opened, length=len(body), more="expect: 100-continue\r\n")
    client = await Socket.open(bench)
    client.writer.write(head)
    assert (await client.answer())[0] == 100
    client.writer.write(body)
    assert (await client.answer())[0] == 200
    client.writer.close()


async def test_a_client_that_closes_gets_all_before_the_end(bench, opened, script, say) -> None:
    script.say(say("one"), say("two"))
    for sent in (
        request(opened, asks("first"), version="1.0"),
        request(opened, asks("second"), more="connection: close\r\n"),
    ):
        client = await Socket.open(bench)
        client.writer.write(sent)
        status, headers, _ = await client.answer()
        assert status == 200 and headers["connection"] == "close"
        assert await client.rest() == b""
        client.writer.close()


async def test_head_has_no_body_and_other_methods_are_named(bench, opened) -> None:
    client = await Socket.open(bench)
    client.writer.write(request(opened, method="HEAD", path="models"))
    status, headers, _ = await client.answer(head=True)
    assert status == 200 and int(headers["content-length"]) > 0
    for method, path in (("GET", "messages"), ("DELETE", "models"), ("HEAD", "responses")):
        client.writer.write(request(opened, method=method, path=path))
        assert (await client.answer(head=method == "HEAD"))[0] == 405
    client.writer.write(request(opened, method="POST", path="embeddings"))
    assert (await client.answer())[0] == 404
    client.writer.close()


async def test_a_body_beyond_the_limit_is_refused_before_it_is_all_there(make_bench) -> None:
    async with make_bench(body_limit_mb=0.1) as bench:
        opened = await bench.open()
        client = await Socket.open(bench)
        client.writer.write(request(opened, b"x" * 200_000, length=1_000_000))
        assert (await client.answer())[0] == 413
        # The rest of it is no request.
        client.writer.write(b"x" * 800_000 + request(opened, method="GET", path="models"))
        assert (await client.answer())[0] == 200
        client.writer.close()


async def test_a_body_that_does_not_come_is_refused_or_forgotten(
    bench, opened, monkeypatch, caplog
) -> None:
    client = await Socket.open(bench)
    client.writer.write(request(opened, b"{", length=100))
    await client.writer.drain()
    client.writer.close()
    await client.writer.wait_closed()
    monkeypatch.setattr(exchange, "BODY_LIMIT_S", 0.05)
    client = await Socket.open(bench)
    client.writer.write(request(opened, b"{", length=100))
    assert (await client.answer())[0] == 408
    client.writer.close()
    assert not caplog.records
    assert bench.calls() == []


async def test_a_fault_is_a_500_that_names_nothing(bench, opened, monkeypatch, caplog) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("inside")

    monkeypatch.setattr(type(CHAT), "read", fails)
    client = await Socket.open(bench)
    client.writer.write(request(opened, asks("first")))
    status, _, body = await client.answer()
    assert status == 500 and body == b""
    assert "was not answered" in caplog.text and "inside" in caplog.text
    client.writer.close()
