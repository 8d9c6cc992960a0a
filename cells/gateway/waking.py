"""Waiting for any of several things to happen, without a task for each."""

from __future__ import annotations

import asyncio


class Waker:
    """What one task waits at."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def wake(self, _: object = None) -> None:
        """End the wait: there is something to look at."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, limit_s: float) -> None:
        """Until ``wake`` is called, or the limit."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        limit = loop.call_later(limit_s, self.wake)
        try:
            await self._waiter
        finally:
            limit.cancel()
            self._waiter = None
