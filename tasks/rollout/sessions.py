"""The execution host's calls to the gateway, which may be restarted at any moment."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from cells.daemon import Registration
from cells.tls import trust_of
from storage.layout import RunLayout
from storage.objects import MissingObjectError, Store

_TRY_LIMIT_S = 20.0
_WATCH_EVERY_S = 2.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class GatewayError(RuntimeError):
    """The gateway refused, or did not answer for as long as we wait; the text says which."""


@dataclass(frozen=True)
class Endpoint:
    """Where an execution's harness finds its model."""

    base_url: str
    api_key: str
    ca: str = ""
    """PEM of what has signed the gateway's certificate; empty where it has none."""


@dataclass(frozen=True)
class Usage:
    """What an execution has used so far."""

    calls: int
    waited_s: float


class GatewaySessions:
    """Sessions of executions. Each call is tried again until ``patience_s`` has passed, with the
    newest registration of the gateway.

    Args:
        patience_s: how long the gateway may be silent; may be changed later.
    """

    def __init__(self, store: Store, layout: RunLayout, patience_s: float = 180.0) -> None:
        self._store = store
        self._key = layout.host("gateway")
        self.patience_s = patience_s
        self._http: aiohttp.ClientSession | None = None
        self._found: Registration | None = None
        self._opened: dict[str, dict[str, Any]] = {}

    async def close_client(self) -> None:
        """Let go of the connections; sessions stay as they are."""
        if self._http is not None:
            await self._http.close()

    async def watch(self) -> None:
        """Open all sessions again whenever another gateway process has taken over, for ever. Its
        harnesses get refusals until then, and try again."""
        incarnation = None
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                answer = await self._try("GET", "/healthz", None)
            except _FAILURES:
                self._found = None
                continue
            if incarnation is not None and answer.get("incarnation") != incarnation:
                for execution, body in list(self._opened.items()):
                    with suppress(GatewayError):
                        await self._call("PUT", execution, body)
            incarnation = answer.get("incarnation")

    async def open(
        self, execution: str, temperature: float, policy_version: int, newer: bool = False
    ) -> Endpoint:
        """Open the session of an execution, or find it open.

        Args:
            newer: weights that are newer than ``policy_version`` may serve it as well.

        Raises:
            GatewayError: refused, or silent for too long.
        """
        body = {"temperature": temperature, "policy_version": policy_version, "newer": newer}
        self._opened[execution] = body
        try:
            answer = await self._call("PUT", execution, body)
        except BaseException:
            self._opened.pop(execution, None)
            raise
        try:
            ca = self._found.ca if self._found else ""
            return Endpoint(str(answer["base_url"]), str(answer["api_key"]), ca)
        except KeyError as error:
            raise GatewayError(f"gateway: the session of {execution} has no {error}") from None

    async def usage(self, execution: str) -> Usage:
        """Calls and waiting time so far.

        Raises:
            GatewayError: refused, or silent for too long.
        """
        return _usage(await self._known("GET", execution))

    async def close(self, execution: str) -> Usage:
        """End the session; what is in flight is aborted. Closing a closed one is no error.

        Raises:
            GatewayError: refused, or silent for too long.
        """
        try:
            return _usage(await self._known("DELETE", execution))
        finally:
            self._opened.pop(execution, None)

    async def forget(self, execution: str) -> None:
        """End a session of an earlier attempt, if the gateway has one.

        Raises:
            GatewayError: refused, or silent for too long.
        """
        with suppress(_UnknownError):
            await self._call("DELETE", execution)

    async def _known(self, method: str, execution: str) -> dict[str, Any]:
        try:
            return await self._call(method, execution)
        except _UnknownError:
            # A new gateway process: the session is in storage until it is opened again.
            if execution not in self._opened:
                raise
            await self._call("PUT", execution, self._opened[execution])
            return await self._call(method, execution)

    async def _call(
        self, method: str, execution: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        started = time.monotonic()
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await self._try(method, f"/admin/executions/{execution}", body)
            except _FAILURES as error:
                problem = f"{type(error).__name__}: {error}"
            self._found = None  # it may have been started again elsewhere
            if time.monotonic() + pause > started + self.patience_s:
                raise GatewayError(
                    f"gateway: {method} {execution}: nothing for {self.patience_s:g} s; {problem}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _try(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        if self._found is None:
            self._found = await asyncio.to_thread(self._store.read_record, self._key, Registration)
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TRY_LIMIT_S))
        async with self._http.request(
            method,
            self._found.url + path,
            json=body,
            headers={"authorization": f"Bearer {self._found.token}"},
            ssl=trust_of(self._found.ca),
        ) as response:
            if response.status in (401, 429) or response.status >= 500:
                raise _LaterError(f"HTTP {response.status}: {(await response.text())[:300]}")
            if response.status >= 400:
                text = (await response.text())[:500]
                kind = _UnknownError if response.status == 404 else GatewayError
                raise kind(f"gateway: {method} {path}: HTTP {response.status}: {text}")
            answer = orjson.loads(await response.read())
        if not isinstance(answer, dict):
            raise GatewayError(f"gateway: {method} {path}: the answer is not an object")
        return answer


class _LaterError(Exception):
    """Worth another try."""


class _UnknownError(GatewayError):
    """No such session."""


_FAILURES = (
    aiohttp.ClientError,
    TimeoutError,
    MissingObjectError,
    orjson.JSONDecodeError,
    _LaterError,
)


def _usage(answer: dict[str, Any]) -> Usage:
    try:
        return Usage(int(answer["calls"]), float(answer["waited_s"]))
    except (KeyError, TypeError, ValueError) as error:
        raise GatewayError(f"gateway: no usage in {str(answer)[:200]}: {error}") from None
