"""Finding the run's pool of KV pages."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from cells.client import DaemonClient, DaemonError
from cells.kv_pool.pool import KvPoolError
from storage.run import Run

NAME = "kv-pool"
"""Under which it registers."""
_POLL_S = 0.2


async def find_pool(run: Run, limit_s: float) -> str:
    """host:port of the pool's master, which may be starting beside the caller.

    Raises:
        KvPoolError: none answers within ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with suppress(DaemonError):
            return await asyncio.to_thread(_address, run)
        await asyncio.sleep(_POLL_S)
    raise KvPoolError(
        f"the pool of KV pages ({NAME}) does not answer after {limit_s:g} s; see its log, or set "
        "cells.kv_pool=false"
    )


def _address(run: Run) -> str:
    client = DaemonClient.find(run.store, run.layout, NAME)
    try:
        return str(client.call("GET", "/status", limit_s=5)["address"])
    finally:
        client.close()
