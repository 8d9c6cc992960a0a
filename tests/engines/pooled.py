"""Real SGLang servers of one policy that share a pool of KV pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil

from cells.kv_pool.pool import KvPool
from cells.ports import free_port
from cells.serving.flags import EngineSettings
from cells.serving.process import EngineProcess
from configs.cells import Device

START_LIMIT_S = 400
POOL_LIMIT_S = 120
POOL_BYTES = 1 << 28
KV_TOKENS = 65_536
REQUESTS = 128


def pooled_settings(policy: Path, context: int, pool: str | None) -> EngineSettings:
    """A server of the pool at the address ``pool``; None: one that is on its own."""
    return EngineSettings(
        policy=policy,
        version=0,
        device=Device.CPU,
        context=context,
        kv_tokens=KV_TOKENS,
        requests=REQUESTS,
        seed=1,
        port=free_port(),
        admin_key="key",
        kv_pool=pool,
    )


@asynccontextmanager
async def pooled_servers(
    policy: Path, context: int, folder: Path
) -> AsyncIterator[list[EngineProcess]]:
    """Two servers, ready, and their pool; their logs are in ``folder``."""
    async with AsyncExitStack() as stack:
        log = folder / "pool.log"
        pool = KvPool(host="127.0.0.1", size=POOL_BYTES, log=log, limit_s=POOL_LIMIT_S)
        stack.callback(pool.close)
        made = []
        for name in ("a", "b"):
            settings = pooled_settings(policy, context, pool.address)
            engine = EngineProcess(settings, cpus=(), log=folder / f"{name}.log")
            stack.push_async_callback(engine.close)
            made.append(engine)
        await asyncio.gather(*(engine.wait_ready(START_LIMIT_S) for engine in made))
        yield made
    assert not psutil.pid_exists(pool.pid)
