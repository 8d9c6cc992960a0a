"""The short way of a request through the HTTP server.

uvicorn hands each request to an application as a scope and takes its answer as messages. That
costs a call as much as its match and its prompt do. So requests of harnesses are taken from
uvicorn's connections as they come, and their answers written there. All others stay uvicorn's, and
so does what there is about connections: keep-alive, pipelines, the end of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cells.gateway.forms import RefusedError
from cells.gateway.waking import Waker

log = logging.getLogger(__name__)

BODY_LIMIT_S = 60.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PHRASES = {one.value: one.phrase.encode() for one in HTTPStatus}

Header = tuple[bytes, bytes]


class ClientGoneError(Exception):
    """Nobody is left to send the rest of a request, or to read an answer."""


class Answering(Protocol):
    """What answers these requests."""

    body_limit: int
    """Bytes."""

    def takes(self, path: str) -> bool:
        """Whether a path is its own."""

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request, to the end or until its client has gone."""


class Exchange(RequestResponseCycle):
    """A request and its answer.

    Attributes:
        path: without the query.
        headers: names are in lower case; of those that are given twice, the first one counts.
        headers_size: bytes of all headers together.
        disconnected: whether the client has gone.
    """

    def __init__(
        self, method: str, path: str, limit: int, headers: list[Header], **connection: Any
    ) -> None:
        super().__init__(**connection)
        self.method = method
        self.path = path
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(headers)
        }
        self.headers_size = sum(len(name) + len(value) for name, value in headers)
        self._limit = limit
        self._size = 0
        self._parts: list[bytes] = []
        self._waker: Waker | None = None

    async def read(self) -> bytes:
        """The body.

        Raises:
            RefusedError: 413 or 408.
            ClientGoneError: it will not come.
        """
        if self.more_body:
            await self._wait_for_body()
        if self._size > self._limit:
            text = f"the body is larger than {self._limit} bytes"
            raise RefusedError(413, "body_too_large", text)
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def take(self, part: bytes, *, last: bool) -> None:
        """Take more of the body; beyond the limit nothing is kept."""
        self.more_body = not last
        self._size += len(part)
        if self._size <= self._limit and part:
            self._parts.append(part)
        elif part:
            self._parts.clear()
        if self._waker is not None and (last or self._size > self._limit):
            self._waker.wake()

    def wake_when_gone(self, waker: Waker) -> None:
        """Have somebody woken when the client goes away."""
        self._waker = waker

    def lost(self) -> None:
        """The client has gone."""
        self.disconnected = True
        if self._waker is not None:
            self._waker.wake()

    def send_whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send an answer in one piece."""
        length = (b"content-length", str(len(body)).encode())
        head = self._head(status, [*headers, length])
        self._write([head] if self.method == "HEAD" else [head, body], last=True)

    def send_head(
        self, status: int, headers: Iterable[Header], part: bytes = b"", *, last: bool = False
    ) -> None:
        """Begin an answer that is sent in parts, with its first one."""
        chunked = (b"transfer-encoding", b"chunked")
        self._write([self._head(status, [*headers, chunked]), *_chunk(part, last)], last=last)

    async def send_part(self, part: bytes, *, last: bool) -> None:
        """Go on with it; waits for a client that does not read."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        self._write(_chunk(part, last), last=last)

    async def _wait_for_body(self) -> None:
        self._waker = waker = Waker()
        await waker.wait(BODY_LIMIT_S)
        self._waker = None
        if self.disconnected:
            raise ClientGoneError
        if self.more_body and self._size <= self._limit:
            text = f"the body took longer than {BODY_LIMIT_S:g} s"
            raise RefusedError(408, "body_too_slow", text)

    def _head(self, status: int, headers: list[Header]) -> bytes:
        self.response_started = True
        if not self.keep_alive:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in (*self.default_headers, *headers)]
        phrase = _PHRASES.get(status, b"")
        return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, phrase, b"".join(lines))

    def _write(self, parts: list[bytes], *, last: bool) -> None:
        if self.disconnected:
            return
        self.transport.write(b"".join(parts))
        if last:
            self.response_complete = True
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class DirectProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, answering: Answering, **server: Any) -> None:
        super().__init__(**server)
        self._answering = answering
        self._running: Exchange | None = None

    def on_headers_complete(self) -> None:
        path = _path(self.url)
        if self.parser.should_upgrade() or not self._answering.takes(path):
            super().on_headers_complete()
            return
        before = self.cycle
        self.cycle = Exchange(
            self.parser.get_method().decode("latin-1"),
            path,
            self._answering.body_limit,
            self.headers,
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is not None and not before.response_complete:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self._start_asgi_task(self.cycle, self.app)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not isinstance(cycle, Exchange):
            super()._start_asgi_task(cycle, app)
            return
        if cycle.waiting_for_100_continue:
            self.transport.write(_CONTINUE)
        self._running = cycle
        task = self.loop.create_task(self._serve(cycle))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        if not isinstance(self.cycle, Exchange):
            super().on_body(body)
        elif not self.cycle.response_complete:
            self.cycle.take(body, last=False)

    def on_message_complete(self) -> None:
        if not isinstance(self.cycle, Exchange):
            super().on_message_complete()
        elif not self.cycle.response_complete:
            self.cycle.take(b"", last=True)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._running is not None:
            self._running.lost()

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self._answering.answer(exchange)
        except ClientGoneError:
            pass
        except Exception:
            log.exception("a request was not answered")
            if not exchange.response_started:
                exchange.send_whole(500, (), b"")
        finally:
            if not exchange.response_complete:
                self.transport.close()  # a cut answer; or its client has gone


def _path(url: bytes) -> str:
    raw = url.partition(b"?")[0] if url.startswith(b"/") else httptools.parse_url(url).path
    path = (raw or b"").decode("latin-1")
    return unquote(path) if "%" in path else path


def _chunk(part: bytes, last: bool) -> list[bytes]:
    """A part as it goes in an answer of chunks; an empty one would end it."""
    chunk = [b"%x\r\n" % len(part), part, b"\r\n"] if part else []
    return [*chunk, b"0\r\n\r\n"] if last else chunk
