"""A small real daemon, for tests that stop it, kill it, or cut it off."""

from __future__ import annotations

import argparse
import asyncio

from cells.daemon import Daemon
from cells.launch import DaemonSpec
from storage.layout import RunLayout
from storage.objects import Store

LIMIT_S = 240.0


def spec(name: str = "small", host: str = "127.0.0.1") -> DaemonSpec:
    return DaemonSpec(name, "tests.chaos.daemons", ("--host", host), LIMIT_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--root", "--run", "--name", "--host"):
        parser.add_argument(name)
    given = parser.parse_args()

    async def close() -> None:
        pass

    daemon = Daemon(
        name=given.name, kind="test", lease_s=120, routes=[], close=close, host=given.host
    )
    asyncio.run(daemon.run(Store(given.root), RunLayout(given.run).host(given.name)))


if __name__ == "__main__":
    main()
