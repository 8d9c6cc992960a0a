"""The end of a daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cells.daemon import Daemon
from storage.layout import RunLayout
from storage.objects import Store


def test_a_daemon_whose_parts_do_not_close_is_not_registered_any_more(tmp_path: Path) -> None:
    async def close() -> None:
        assert store.exists(key)
        raise RuntimeError("does not close")

    async def run() -> None:
        daemon = Daemon(name="d", kind="test", lease_s=0, routes=[], close=close)
        await asyncio.to_thread(asyncio.run, daemon.run(store, key))  # leaves signals alone

    store, key = Store(str(tmp_path)), RunLayout("run").host("d")
    with pytest.raises(RuntimeError, match="does not close"):
        asyncio.run(run())
    assert not store.exists(key)
