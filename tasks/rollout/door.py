"""The only way from an execution to its model: a small proxy that the host serves for it alone.

The harness finds it on the loopback device of its own network and needs no key. Whatever arrives
there goes to this execution's address of the gateway with this execution's key, so that no other
execution can be reached, and what the gateway failed at is known here first hand instead of from
the harness, which the agent may have forged.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from cells.tls import trust_of
from tasks.rollout.sessions import Endpoint

CONNECTIONS = 64
BACKLOG = 32
"""Connections of an execution: so many are kept, and so many more may come at the same moment."""
BODY_BYTES = 32 << 20
DUMMY_KEY = "sandbox"
"""What clients that insist on a key are given."""

_PATH = re.compile(r"/v1(/[A-Za-z0-9_][A-Za-z0-9_.:-]*)+")
_KEEP_S = 86_400.0
_CONNECT_S = 30.0
_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_NOT_FORWARDED = _HOP | {"authorization", "x-api-key", "proxy-authorization", "cookie"}
_NOT_FORWARDED |= {"host", "content-length", "expect", "accept-encoding"}
_NOT_RETURNED = _HOP | {"set-cookie", "server"}
_OURS = frozenset((401, 502, 503, 504))
"""Answers that say the gateway or what is behind it fails, whatever was asked. Not among them are
those that a request can provoke."""


class Door:
    """Serves one execution from ``open`` to ``close``.

    Args:
        endpoint: the execution's address of the gateway, and its key.
        http: shared client without limits of its own on time and connections.
    """

    def __init__(self, endpoint: Endpoint, http: aiohttp.ClientSession) -> None:
        self._endpoint = endpoint
        self._http = http
        self._running = 0
        self._quiet_since = time.monotonic()
        self._problem = ""
        self._problem_s = 0.0
        self._server: asyncio.Server | None = None
        self._connections = web.Server(
            self._answer,
            request_factory=_make_request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_S,
        )

    async def open(self, listener: socket.socket) -> None:
        """Accept what connects to ``listener``, which is closed with this."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, sock=listener, backlog=BACKLOG)

    async def close(self) -> None:
        """End all connections; calls that are on their way are given up."""
        if self._server is not None:
            self._server.close()
        await self._connections.shutdown(0)

    @property
    def problem(self) -> str:
        """What the gateway failed at last; empty when it has answered since, or never failed."""
        return self._problem

    @property
    def problem_s(self) -> float:
        """How long that call had taken."""
        return self._problem_s

    def quiet_s(self, now: float) -> float:
        """For how long no call has been on its way, in seconds of the monotonic clock."""
        return 0.0 if self._running else now - self._quiet_since

    def _accept(self) -> asyncio.BaseProtocol:
        if len(self._connections.connections) >= CONNECTIONS:
            return _Refused()
        return self._connections()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if _PATH.fullmatch(request.raw_path.partition("?")[0]) is None:
            return _error(404, f"{request.path[:80]}: there is nothing but /v1")
        self._running += 1
        started = time.monotonic()
        try:
            return await self._forward(request)
        finally:
            self._running -= 1
            self._quiet_since = time.monotonic()
            self._problem_s = self._quiet_since - started if self._problem else 0.0

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        headers = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in _NOT_FORWARDED
        )
        headers["authorization"] = f"Bearer {self._endpoint.api_key}"
        url = self._endpoint.base_url + request.raw_path.removeprefix("/v1")
        begun: web.StreamResponse | None = None
        try:
            async with self._http.request(
                request.method,
                url,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=trust_of(self._endpoint.ca),
            ) as answer:
                begun = _beginning(answer)
                await begun.prepare(request)
                async for piece in answer.content.iter_any():
                    await begun.write(piece)
                await begun.write_eof()
                failed = answer.status in _OURS
                self._problem = f"the gateway answered {answer.status}" if failed else ""
                return begun
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if request.transport is None or request.transport.is_closing():
                raise asyncio.CancelledError from None  # the harness has gone away
            self._problem = f"the gateway can't be reached: {type(error).__name__}: {error}"
            if begun is None or not begun.prepared:
                return _error(502, self._problem)
            raise  # in the middle of an answer: the connection ends


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def make_client() -> aiohttp.ClientSession:
    """The client that the doors of a host share. A call lasts as long as the gateway lets it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
    )


def loopback_listener() -> socket.socket:
    """For an execution without a network of its own: a free port of this machine."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    listener.setblocking(False)
    return listener


def _make_request(*arguments: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(*arguments, loop, client_max_size=BODY_BYTES)  # type: ignore


def _beginning(answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in _NOT_RETURNED:
            response.headers.add(name, value)
    return response


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": {"message": text, "type": "door"}}, status=status)
