"""Ids that wait a little for more."""

from __future__ import annotations

import asyncio

from cells.gateway.streaming import Gathered

LIMIT_S = 30.0


async def test_what_comes_together_goes_together_and_what_is_dropped_not_at_all() -> None:
    went: asyncio.Queue[list[int]] = asyncio.Queue()
    gathered = Gathered(went.put_nowait)
    gathered.put([1, 2])
    gathered.put([])
    gathered.put([3])
    assert went.empty()
    assert await asyncio.wait_for(went.get(), LIMIT_S) == [1, 2, 3]
    gathered.put([4])
    gathered.drop()
    gathered.put([5])
    assert await asyncio.wait_for(went.get(), LIMIT_S) == [5]
