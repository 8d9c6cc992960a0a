"""HTTP/1.1 to engines over kept connections: one request at a time on each, its answer as it comes.

A general client spends on a request and its answer more than the gateway does on all the rest of a
call. This one knows only what engines need: a body that is there, and an answer of known length or
in chunks.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

CONNECT_LIMIT_S = 5.0
CATCH_UP_TURNS = 20
"""Turns of the event loop that a connection has beyond its limit: a loop that is behind fires its
timers before it looks at what has come, and the delay is not the server's."""
IDLE_S = 4.0
"""SGLang's server drops a connection that was idle for 5 s; drop it first."""
ERROR_BYTES = 500
"""What is kept of an answer that is an error."""

Take = Callable[[bytes], None]


class Place(NamedTuple):
    """Where a server listens, and the path in front of its own."""

    host: str
    port: int
    secure: bool
    path: str


class Wire:
    """Connections to all engines.

    Args:
        trust: for those with TLS; None is what the machine trusts.
    """

    def __init__(self, trust: ssl.SSLContext | None = None) -> None:
        self._trust = trust
        self._idle: defaultdict[Place, list[_Connection]] = defaultdict(list)

    async def post(
        self,
        url: str,
        path: str,
        token: str | None,
        body: Sequence[bytes],
        take: Take,
        method: str = "POST",
    ) -> tuple[int, bytes]:
        """Send JSON, and hand the body of an answer with status 200 to ``take`` as it comes.

        Args:
            url: of the server.
            body: in parts, which are not put together here: a prompt can be a megabyte.
            token: bearer token, if the server wants one.

        Returns:
            The status, and for any but 200 the beginning of the answer.

        Raises:
            OSError: no connection, or it ended before the answer did.
            ValueError: what came is no HTTP. What ``take`` raises is passed on.
        """
        place = _place(url)
        idle = self._idle[place]
        connection = idle.pop() if idle else await self._connect(place, idle)
        connection.keep(None)
        try:
            head = _head(method, place, path, token, sum(map(len, body)))
            answer = await connection.exchange([head, *body], take)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            idle.append(connection)
            connection.keep(IDLE_S)
        else:
            connection.close()
        return answer

    async def _connect(self, place: Place, idle: list[_Connection]) -> _Connection:
        secure = (self._trust or ssl.create_default_context()) if place.secure else None
        return await _connect(place, idle, secure)

    def close(self) -> None:
        """Drop the connections that nobody uses."""
        for idle in self._idle.values():
            for connection in tuple(idle):
                connection.close()


class _Connection(asyncio.Protocol):
    """One connection. ``idle`` is where it waits between requests."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport
        self._expiry: asyncio.TimerHandle | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.reusable = False

    async def exchange(self, request: list[bytes], take: Take) -> tuple[int, bytes]:
        self._answer = asyncio.get_running_loop().create_future()
        self._take = take
        self._whole = self.reusable = False
        self._error = b""
        self._transport.writelines(request)
        try:
            return await self._answer
        finally:
            self._take = _nobody  # a connection that waits keeps no call

    def keep(self, seconds: float | None) -> None:
        """Close after so long; None for not at all."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if seconds is not None:
            self._expiry = asyncio.get_running_loop().call_later(seconds, self.close)

    def close(self) -> None:
        self.keep(None)
        self._forget()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.keep(None)
        self._forget()
        self._fail(error or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
            self._hand_over()
        except httptools.HttpParserError as error:
            self._fail(ValueError(f"no HTTP: {error}"))
        except Exception as error:  # noqa: BLE001  (of ``take``; whoever waits gets it)
            self._fail(error)

    def on_headers_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._whole = True

    def _hand_over(self) -> None:
        """What one read brought, in one piece."""
        status = self._parser.get_status_code()
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            if status == 200:
                self._take(data)
            else:
                self._error = (self._error + data)[:ERROR_BYTES]
        if self._whole and self._answer is not None and not self._answer.done():
            self._answer.set_result((status, self._error))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _forget(self) -> None:
        if self in self._idle:
            self._idle.remove(self)


async def _connect(
    place: Place, idle: list[_Connection], secure: ssl.SSLContext | None
) -> _Connection:
    loop = asyncio.get_running_loop()
    connecting = asyncio.ensure_future(
        loop.create_connection(lambda: _Connection(idle), place.host, place.port, ssl=secure)
    )
    try:
        await asyncio.wait({connecting}, timeout=CONNECT_LIMIT_S)
        for _ in range(CATCH_UP_TURNS):
            if connecting.done():
                _, connection = connecting.result()
                return connection
            await asyncio.sleep(0)
    finally:
        connecting.cancel()
    raise ConnectionError(f"no connection within {CONNECT_LIMIT_S:g} s")


def _nobody(data: bytes) -> None:
    """Takes what comes when nothing was asked."""


@lru_cache(maxsize=1024)
def _place(url: str) -> Place:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    return Place(parts.hostname or "", port, secure, parts.path.rstrip("/"))


def _head(method: str, place: Place, path: str, token: str | None, length: int) -> bytes:
    host = f"[{place.host}]" if ":" in place.host else place.host
    bearer = f"authorization: Bearer {token}\r\n" if token else ""
    return (
        f"{method} {place.path}{path} HTTP/1.1\r\nhost: {host}:{place.port}\r\n{bearer}"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()
