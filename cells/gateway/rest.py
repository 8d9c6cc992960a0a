"""Executions whose client is busy elsewhere are kept small until it asks again."""

from __future__ import annotations

import asyncio
import ctypes
import pickle
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol

import zstandard

from cells.gateway.matching import Branches

REST_AFTER_S = 60.0
"""Without a call for so long, an execution rests: tools that run for a minute are worth the 20 ms
that packing and unpacking a long history takes."""
LOOK_EVERY_S = 10.0
_LEVEL = 3


class Drawer:
    """Keeps the recorded calls of one execution, packed while nobody asks for them."""

    def __init__(self, branches: Branches) -> None:
        self._kept: Branches | bytes = branches
        self._used_at = time.monotonic()

    def open(self) -> Branches:
        """The recorded calls."""
        self._used_at = time.monotonic()
        if isinstance(self._kept, bytes):
            _, self._kept = pickle.loads(zstandard.decompress(self._kept))
        assert isinstance(self._kept, Branches)
        return self._kept

    @property
    def packed_bytes(self) -> int | None:
        """How much it holds while packed, else None."""
        return len(self._kept) if isinstance(self._kept, bytes) else None

    def is_idle(self, after_s: float) -> bool:
        """Whether it could be packed, and was not opened for so long."""
        loose = not isinstance(self._kept, bytes)
        return loose and time.monotonic() - self._used_at >= after_s

    async def pack(self) -> bool:
        """Pack, unless it is opened meanwhile; whether it was packed."""
        used_at, branches = self._used_at, self._kept
        if isinstance(branches, bytes):
            return False
        # With parents first, which pickle would else reach by one level of recursion each.
        nodes = branches.nodes()
        for node in nodes:
            node.pack()
        data = pickle.dumps((nodes, branches), protocol=5)
        packed = await asyncio.to_thread(zstandard.compress, data, _LEVEL)
        if self._used_at != used_at:
            return False
        self._kept = packed
        return True


class Restful(Protocol):
    """An execution that can rest."""

    async def rest(self, after_s: float) -> bool: ...


async def rest_idle(sessions: Mapping[str, Restful]) -> None:
    """Look for ever for executions that can rest."""
    while True:
        await asyncio.sleep(min(LOOK_EVERY_S, REST_AFTER_S))
        if await _rest(tuple(sessions.values())):
            await asyncio.to_thread(give_back_memory)


async def _rest(sessions: Iterable[Restful]) -> bool:
    rested = [await session.rest(REST_AFTER_S) for session in sessions]
    return any(rested)


def give_back_memory() -> None:
    """glibc keeps what was freed, and after long histories that is far more than what is used."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
