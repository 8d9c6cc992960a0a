"""What a call leaves is freed at once: a collector that has to find it holds up all other calls."""

from __future__ import annotations

import asyncio
import gc

import pytest

from cells.gateway.calls import LiveCall
from cells.gateway.resends import Shared
from tests.cells.gateway.conftest import LIMIT_S


def left() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, LiveCall)]


@pytest.fixture
def uncollected():
    gc.collect()
    before = len(left())
    gc.disable()
    yield before
    gc.enable()


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_of_a_call_is_left_to_the_collector(
    uncollected, bench, engine, script, say, stream
) -> None:
    script.say(*(say(f"answer {number}") for number in range(4)))
    await bench.cell("a", engine)
    execution = await bench.open()
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(4):
        answer = await execution.chat(messages, stream=stream)
        assert answer.status_code == 200, answer.text
        messages = [*messages, {"role": "user", "content": "more"}]
    async with asyncio.timeout(LIMIT_S):
        while len(left()) > uncollected:  # noqa: ASYNC110  (the last may have callbacks to come)
            await asyncio.sleep(0)
    # While the answer itself is kept, for a client that may ask again.
    assert any(isinstance(one, Shared) for one in gc.get_objects())
