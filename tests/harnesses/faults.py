"""A network between sandbox and gateway that fails at chosen calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import aiohttp
import orjson


class Fault(Enum):
    """What happens to a call instead."""

    UNAVAILABLE = "answered with 503, and never sent on"
    CUT = "the connection breaks after the first text of the answer"


class Network:
    """Stands for the client that doors share.

    Args:
        plan: the fault of a call by its number, counted from 1 over all calls.
        after: called when a fault has happened.
    """

    def __init__(
        self,
        real: aiohttp.ClientSession,
        plan: dict[int, Fault],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._real = real
        self._plan = plan
        self._after = after
        self.calls = 0
        self.happened: list[Fault] = []

    @asynccontextmanager
    async def request(self, method: str, url: str, **more: Any) -> AsyncIterator[Any]:
        self.calls += method == "POST"
        fault = self._plan.get(self.calls) if method == "POST" else None
        if fault is Fault.UNAVAILABLE:
            self._happen(fault)
            yield _Unavailable()
            return
        async with self._real.request(method, url, **more) as answer:
            yield _Cut(answer, lambda: self._happen(Fault.CUT)) if fault is Fault.CUT else answer

    def _happen(self, fault: Fault) -> None:
        self.happened.append(fault)
        self._after()


class _Unavailable:
    def __init__(self) -> None:
        self.status, self.reason = 503, "Service Unavailable"
        self.headers = {"content-type": "application/json", "retry-after": "1"}
        error = {"type": "api_error", "message": "later"}
        self._body = orjson.dumps({"type": "error", "error": error})

    @property
    def content(self) -> _Unavailable:
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._body


class _Cut:
    def __init__(self, answer: aiohttp.ClientResponse, happen: Callable[[], None]) -> None:
        self.status, self.reason, self.headers = answer.status, answer.reason, answer.headers
        self._answer = answer
        self._happen = happen

    @property
    def content(self) -> _Cut:
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        async for piece in self._answer.content.iter_any():
            yield piece
            if b"delta" in piece:
                self._happen()
                raise aiohttp.ClientPayloadError("cut")
