"""A loop that somebody blocks is noticed and told."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from cells import lag as lag_module
from cells.lag import Lag


async def test_a_blocked_loop_is_measured_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lag_module, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(lag_module, "ALARM_S", 0.2)
    lag = Lag("gateway")
    watch = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    with caplog.at_level(logging.WARNING, logger="cells.lag"):
        time.sleep(0.3)  # noqa: ASYNC251 - this is what is to be noticed
        while not lag.worst_s:  # noqa: ASYNC110 - a figure, no event
            await asyncio.sleep(0.01)
    watch.cancel()
    assert lag.worst_s >= 0.25
    assert "gateway: the event loop was 0." in caplog.text
