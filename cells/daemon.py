"""What every daemon has: a lease, an epoch, a registration in storage, and a clean end."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cells.lag import Lag
from cells.ports import listen
from cells.tls import Tls
from storage.objects import MissingObjectError, Store
from storage.records import Record


class Registration(Record):
    """Where a daemon listens; written when it is ready, looked at by whoever adopts it."""

    name: str
    kind: str
    url: str
    token: str
    """Bearer token of its administrative calls."""
    pid: int
    incarnation: str
    started_at: float
    ca: str = ""
    """PEM of what has signed its certificate; empty where it speaks plain HTTP."""
    machine: str = ""
    """See ``this_machine``: ``pid`` means something only there."""


def this_machine() -> str:
    """A name of this machine or container that no other has, new after each boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"


class StaleEpochError(RuntimeError):
    """A command of an older epoch: its sender was replaced."""


class Lease:
    """Time until which somebody wants this daemon to live.

    Args:
        ttl_s: seconds that one renewal is good for; also the time to the first.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._until = time.monotonic() + ttl_s

    def renew(self) -> None:
        self._until = time.monotonic() + self.ttl_s

    def left_s(self) -> float:
        return self._until - time.monotonic()


class Fence:
    """The highest epoch seen; commands of an older one are refused."""

    def __init__(self) -> None:
        self.epoch = 0

    def admit(self, epoch: int) -> None:
        """Take a command of ``epoch``.

        Raises:
            StaleEpochError: a newer epoch has been seen.
        """
        if epoch < self.epoch:
            raise StaleEpochError(f"epoch {epoch} is older than {self.epoch}")
        self.epoch = epoch


class _Server(uvicorn.Server):
    """Leaves signals to the daemon: uvicorn would raise a signal again when it has ended, which
    ends the process before what the daemon owns is closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Daemon:
    """Serves an application until its lease ends, a stop is asked for, or a signal comes.

    Args:
        name: unique in the run; also the name of the registration.
        kind: ``gateway``, ``execution-host``, ``cell`` or ``kv-pool``.
        routes: of the daemon itself. ``/healthz``, ``/lease`` and ``/stop`` are added.
        close: ends everything that the daemon owns.
        tls: certificates of the run, for a ``host`` that is not the loopback address.
    """

    def __init__(
        self,
        *,
        name: str,
        kind: str,
        lease_s: float,
        routes: list[Route],
        close: Callable[[], Awaitable[None]],
        host: str = "127.0.0.1",
        port: int = 0,
        tls: Tls | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.lease = Lease(lease_s)
        self.token = secrets.token_urlsafe(24)
        self.incarnation = secrets.token_hex(8)
        self._close = close
        self._address = (host, port)
        self._tls = tls
        self._stop = asyncio.Event()
        self._lag = Lag(name)
        self.http: Any = "auto"
        """uvicorn's ``http``: which protocol its connections speak."""
        self.app: ASGIApp = Starlette(
            routes=[
                *routes,
                Route("/healthz", self._healthz, methods=["GET"]),
                Route("/lease", self._renew, methods=["POST"]),
                Route("/stop", self._ask_stop, methods=["POST"]),
            ]
        )

    def authorised(self, request: Request) -> bool:
        """Whether an administrative request carries this daemon's token."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return secrets.compare_digest(given.encode(), self.token.encode())

    def stop(self) -> None:
        """End as if it had been asked to; from its own event loop."""
        self._stop.set()

    async def run(self, store: Store, key: str) -> None:
        """Listen, register at ``key``, serve, and close everything at the end."""
        host, port = self._address
        with socket.create_server((host, port)) if port else listen(host) as listener:
            host, port = listener.getsockname()[:2]
            config, ca = await asyncio.to_thread(self._configured)
            server = _Server(config)
            scheme = "https" if ca else "http"
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            registration = Registration(
                name=self.name,
                kind=self.kind,
                url=f"{scheme}://{host}:{port}",
                ca=ca,
                token=self.token,
                machine=this_machine(),
                pid=os.getpid(),
                incarnation=self.incarnation,
                started_at=time.time(),
            )
            await asyncio.to_thread(store.write_record, key, registration)
            self._stop_at_signals()
            lag = asyncio.create_task(self._lag.watch())
            try:
                await self._until_stop(serving)
            finally:
                lag.cancel()
                self._stop.set()  # from here on nobody may adopt it
                try:
                    await self._close()
                finally:
                    server.should_exit = True
                    await serving
                    await asyncio.to_thread(self._forget, store, key)

    def _configured(self) -> tuple[uvicorn.Config, str]:
        """How it serves, and what its clients trust.

        Raises:
            TlsError: a certificate of the settings can't be used.
        """
        nothing = nullcontext(None)
        with self._tls.identity(self._address[0]) if self._tls else nothing as identity:
            config = uvicorn.Config(
                self.app,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=120,
                timeout_graceful_shutdown=5,
                lifespan="off",
                http=self.http,
                ws="none",
                proxy_headers=False,
                ssl_certfile=identity.certificate if identity else None,
                ssl_keyfile=identity.key if identity else None,
            )
            config.load()  # while the files are there
        return config, identity.ca if identity else ""

    def _forget(self, store: Store, key: str) -> None:
        """Delete the registration, unless a successor has put its own there."""
        with suppress(MissingObjectError):
            if store.read_record(key, Registration).incarnation == self.incarnation:
                store.delete(key)

    def _stop_at_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop.set)

    async def _until_stop(self, serving: asyncio.Task[None]) -> None:
        while not serving.done():
            try:
                await asyncio.wait_for(self._stop.wait(), timeout=1)
                return
            except TimeoutError:
                if self.lease.left_s() <= 0:
                    return

    async def _healthz(self, request: Request) -> Response:
        if self._stop.is_set():
            return JSONResponse({"error": f"{self.name} is stopping"}, 503)
        return JSONResponse(
            {
                "name": self.name,
                "kind": self.kind,
                "incarnation": self.incarnation,
                "pid": os.getpid(),
                "lease_left_s": round(self.lease.left_s(), 1),
                "loop_lag_s": round(self._lag.last_s, 3),
                "worst_loop_lag_s": round(self._lag.worst_s, 3),
            }
        )

    async def _renew(self, request: Request) -> Response:
        if not self.authorised(request):
            return JSONResponse({"error": "wrong token"}, 401)
        self.lease.renew()
        lag_s = round(self._lag.take_recent(), 3)
        return JSONResponse({"lease_left_s": self.lease.left_s(), "recent_loop_lag_s": lag_s})

    async def _ask_stop(self, request: Request) -> Response:
        if not self.authorised(request):
            return JSONResponse({"error": "wrong token"}, 401)
        self._stop.set()
        return JSONResponse({"stopping": True})
