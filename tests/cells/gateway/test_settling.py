"""Executions whose cell leaves go on elsewhere when its pages are in the pool, or at a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.cells.gateway.conftest import LIMIT_S, Bench, MakeBench
from tests.cells.gateway.test_reroute import HELLO, assert_whole

FIRST = 7
"""Tokens that the first cell samples."""


@pytest.fixture
async def bench(make_bench: MakeBench) -> AsyncIterator[Bench]:
    async with make_bench(cells={"kv_pool": True, "kv_backup_limit_s": LIMIT_S}) as made:
        yield made


async def interrupted(bench, engine, other, script, say) -> tuple[asyncio.Task, list[int]]:
    """A call that stands still on a cell, while another one has room."""
    await bench.cell("a", engine)
    execution = await bench.open()
    ids = say("a long enough answer")
    script.say(ids)
    engine.hold_after = FIRST
    call = asyncio.create_task(execution.chat(HELLO))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    await bench.cell("b", other)
    return call, ids


async def test_the_rest_is_asked_for_when_the_pages_are_written(
    bench, engine, other, script, say
) -> None:
    call, ids = await interrupted(bench, engine, other, script, say)
    engine.written = False
    leaving = asyncio.create_task(bench.cell("a", engine, state="leaving"))
    await bench.until(lambda state: state["cells"]["a"]["in_flight"] == 0)
    state = await bench.until(lambda state: state["waiting"] == 1)
    assert state["cells"]["b"]["live"] == 0 and not other.requests
    engine.written = True
    await leaving
    assert (await call).status_code == 200
    (recorded,) = bench.calls()
    assert_whole(recorded, bench, ids)
    assert [(one.cell, one.prompt_tokens) for one in recorded.served] == [
        ("a", len(recorded.new_ids)),
        ("b", len(recorded.new_ids) + FIRST),
    ]
    assert recorded.cached_tokens == len(recorded.new_ids) - 1, "of the cell where it began"
    text = (await bench.http.get(f"{bench.url}/metrics")).text
    assert f"gyre_gateway_rerouted_tokens_total {len(recorded.new_ids) + FIRST}.0" in text


async def test_an_engine_that_is_gone_is_not_waited_for(bench, engine, other, script, say) -> None:
    call, ids = await interrupted(bench, engine, other, script, say)
    script.say(ids)  # nothing of an answer that is not streamed was there
    await engine.stop()
    await bench.cell("a", engine, state="leaving")
    assert (await call).status_code == 200
    assert_whole(bench.calls()[0], bench, ids)


async def test_the_wait_for_pages_ends_at_its_limit(
    make_bench: MakeBench, engine, other, script, say
) -> None:
    async with make_bench(cells={"kv_pool": True, "kv_backup_limit_s": 0.1}) as bench:
        call, ids = await interrupted(bench, engine, other, script, say)
        engine.written = False
        await bench.cell("a", engine, state="leaving")
        assert (await call).status_code == 200
        assert engine.probes > 0
        assert_whole(bench.calls()[0], bench, ids)


async def test_without_a_pool_nothing_is_waited_for(
    make_bench: MakeBench, engine, other, script, say
) -> None:
    async with make_bench() as bench:
        call, _ = await interrupted(bench, engine, other, script, say)
        await bench.cell("a", engine, state="leaving")
        assert (await call).status_code == 200
        assert engine.probes == 0
