"""``python -m cells.kv_pool``: the daemon of the shared KV pages of a run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cells.daemon import Daemon
from cells.kv_pool.pool import KvPool, KvPoolError
from cells.reason import CAN_NOT_START
from configs.load import ConfigError
from storage.objects import StorageError
from storage.run import Run, open_run

_START_LIMIT_S = 60.0
_WATCH_S = 1.0

log = logging.getLogger("cells.kv_pool")


async def serve(run: Run, name: str) -> None:
    """Start the pool, tell its address under ``/status``, end it.

    It ends itself when its master is gone: engines then compute their prefixes anew.

    Raises:
        KvPoolError: it did not start.
    """
    pool = KvPool(
        # Beside the flow, as the gateway is; cells of other machines reach it at the same address.
        host=run.config.gateway.host,
        size=int(run.config.cells.kv_pool_gb * 1e9),
        log=run.store.local_file(run.layout.log(f"{name}-master")),
        limit_s=_START_LIMIT_S,
    )

    async def status(_: Request) -> Response:
        return JSONResponse({"address": pool.address, "failure": pool.failure()})

    async def close() -> None:
        await asyncio.to_thread(pool.close)

    daemon = Daemon(
        name=name,
        kind="kv-pool",
        lease_s=run.config.cells.lease_s,
        routes=[Route("/status", status, methods=["GET"])],
        close=close,
    )
    serving = asyncio.create_task(daemon.run(run.store, run.layout.host(name)))
    while not (await asyncio.wait({serving}, timeout=_WATCH_S))[0]:
        if why := pool.failure():
            log.error("%s ends: %s", name, why)
            daemon.stop()
            break
    await serving


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m cells.kv_pool", description=__doc__)
    parser.add_argument("--root", required=True, help="storage root")
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--name", required=True, help="name of the registration")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        asyncio.run(serve(open_run(given.root, given.run), given.name))
    except (KvPoolError, StorageError, ConfigError) as error:
        log.error("%s %s%s", given.name, CAN_NOT_START, error)
        sys.exit(1)


if __name__ == "__main__":
    main()
