"""A stop text that begins on one cell and ends on the next."""

from __future__ import annotations

import asyncio

import pytest

from storage.records import CallStatus
from tests.cells.gateway.conftest import LIMIT_S, deltas

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [6, 7, 8])
async def test_a_stop_text_over_two_cells_ends_the_answer(
    bench, engine, other, script, say, tokenizer, stream, cut
) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    ids = say("alphaENDbeta")
    script.say(ids)
    engine.hold_after = cut
    call = asyncio.create_task(execution.chat(HELLO, stream=stream, stop=["END"], max_tokens=50))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    await bench.cell("b", other)
    await bench.cell("a", engine, state="leaving")
    response = await call
    if stream:
        said = deltas(response.text)
        assert (said["content"], said["finish_reason"]) == ("alpha", "stop")
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("alpha", "stop")
    (recorded,) = bench.calls()
    assert recorded.status is CallStatus.COMPLETE
    assert tokenizer.decode(list(recorded.output_ids)) == "alphaEND"
    assert list(recorded.output_ids) == ids[: len(recorded.output_ids)]
    assert len(recorded.output_logprobs) == len(recorded.output_ids)
    assert [(s.start, s.end) for s in recorded.spans] == [(0, len(recorded.output_ids))]
