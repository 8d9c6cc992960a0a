"""Executions whose client is busy elsewhere are kept small until it asks again."""

from __future__ import annotations

import asyncio
import ctypes
import io
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
_AT_ONCE = 16
"""Calls that are pickled in a row. All of a long history would hold up every other execution for a
tenth of a second."""


class Drawer:
    """Keeps the recorded calls of one execution, packed while nobody asks for them."""

    def __init__(self, branches: Branches) -> None:
        self._kept: Branches | bytes = branches
        self._used_at = time.monotonic()

    def open(self) -> Branches:
        """The recorded calls."""
        self._used_at = time.monotonic()
        if isinstance(self._kept, bytes):
            self._kept = _unpacked(self._kept)
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
        nodes, data = branches.nodes(), io.BytesIO()
        pickler = pickle.Pickler(data, protocol=5)
        for at in range(0, len(nodes), _AT_ONCE):
            part = nodes[at : at + _AT_ONCE]
            for node in part:
                node.pack()
            pickler.dump(part)
            await asyncio.sleep(0)
            if self._used_at != used_at:
                return False
        pickler.dump(branches)
        packed = await asyncio.to_thread(zstandard.compress, data.getbuffer(), _LEVEL)
        if self._used_at != used_at:
            return False
        self._kept = packed
        return True


def _unpacked(packed: bytes) -> Branches:
    """What was packed: rows of calls, and at last the tree that they are in."""
    unpickler = pickle.Unpickler(io.BytesIO(zstandard.decompress(packed)))
    while not isinstance(part := unpickler.load(), Branches):
        pass
    return part


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
