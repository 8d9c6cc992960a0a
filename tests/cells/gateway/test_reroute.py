"""Cells that leave, fail or fill up; clients that go away."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import pytest

from storage.records import CallStatus
from tests.cells.gateway.conftest import LIMIT_S, prompts
from tests.engines.scripted import ScriptedEngine, logprob

HELLO = [{"role": "user", "content": "hello"}]


def assert_whole(call, bench, reply_ids) -> None:
    """Every token of the script once, in order, with the log-prob that it has at its position."""
    assert list(call.output_ids) == reply_ids
    prompt = prompts(bench.calls())[call.call_id]
    expected = [logprob(len(prompt) + at, token) for at, token in enumerate(reply_ids)]
    assert list(call.output_logprobs) == expected
    assert call.spans[0].start == 0 and call.spans[-1].end == len(reply_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_cell_hands_over_in_mid_generation(
    bench, engine, other, script, say, stream
) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    ids = say("a long enough answer")
    script.say(ids)
    engine.hold_after = 7
    call = asyncio.create_task(execution.chat(HELLO, stream=stream, max_tokens=50))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    await bench.cell("b", other)
    left = await bench.cell("a", engine, state="leaving")
    assert (left["live"], left["in_flight"]) == (0, 0)
    response = await call
    assert response.status_code == 200
    assert "long enough" in response.text or stream
    (recorded,) = bench.calls()
    assert_whole(recorded, bench, ids)
    assert recorded.cell == "b"
    (again,) = other.requests
    assert again["input_ids"] == engine.requests[0]["input_ids"] + ids[:7]
    assert again["sampling_params"]["max_new_tokens"] == 43
    assert (await bench.state())["cells"]["b"]["live"] == 1


async def test_missed_abort_is_asked_again(bench, engine, other, script, say) -> None:
    await bench.cell("a", engine)
    await bench.cell("b", other, capacity=1)
    execution = await bench.open()
    script.say(say("an answer"))
    engine.hold_after = 2
    engine.fail.append("deaf")
    call = asyncio.create_task(execution.chat(HELLO))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    await bench.cell("a", engine, state="leaving")
    assert (await call).status_code == 200
    assert len(engine.aborts) == 2


async def test_waits_when_no_cell_is_left(bench, engine, other, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    ids = say("an answer")
    script.say(ids)
    engine.hold_after = 3
    call = asyncio.create_task(execution.chat(HELLO))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    await bench.cell("a", engine, state="leaving")
    state = await bench.state()
    assert (state["live"], state["waiting"]) == (0, 1)
    await bench.cell("b", other)
    assert (await call).status_code == 200
    (recorded,) = bench.calls()
    assert_whole(recorded, bench, ids)
    assert recorded.waited_s > 0
    seen = await bench.admin("GET", "/admin/executions/e1")
    assert seen["waited_s"] >= recorded.waited_s * 0.99 and seen["state"] == "open"


@pytest.mark.parametrize("incremental", [False, True])
async def test_lost_connection_keeps_what_was_streamed(
    bench, script, say, other, incremental
) -> None:
    first = ScriptedEngine(script, incremental=incremental)
    await first.start()
    try:
        await bench.cell("a", first)
        execution = await bench.open()
        ids = say("an answer of some length")
        script.say(ids)
        first.hold_after = 5
        first.fail.append("drop")
        call = asyncio.create_task(execution.chat(HELLO, stream=True))
        await asyncio.wait_for(first.reached.wait(), LIMIT_S)
        first.hold_after = None
        assert (await call).status_code == 200
        (recorded,) = bench.calls()
        assert_whole(recorded, bench, ids)
        assert first.requests[1]["input_ids"][-5:] == ids[:5]
    finally:
        await first.stop()


async def test_failing_engine_is_left_for_another(bench, engine, other, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("an answer"))
    engine.fail.extend(["500", "500"])
    await bench.cell("b", other, capacity=2)
    assert (await execution.chat(HELLO)).status_code == 200
    assert bench.calls()[0].cell == "b"


async def test_disconnect_is_abandoned_and_the_generation_aborted(
    bench, engine, script, say
) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    ids = say("an answer")
    script.say(ids, ids, say("again"))
    engine.hold_after = 3
    for stream in (False, True):
        engine.reached.clear()
        call = asyncio.create_task(execution.chat(HELLO, stream=stream))
        await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        await bench.until(lambda state: state["cells"]["a"]["in_flight"] == 0)
    await bench.until(lambda state: state["calls"] == 2)
    calls = bench.calls()
    assert [call.status for call in calls] == [CallStatus.ABANDONED] * 2
    assert list(calls[0].output_ids) == ids[:3]
    engine.hold_after = None
    await execution.reply(HELLO)
    assert bench.calls()[2].fork_reason is None


async def test_closing_ends_what_runs(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("an answer"))
    engine.hold_after = 3
    call = asyncio.create_task(execution.chat(HELLO))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    closed = await bench.admin("DELETE", "/admin/executions/e1")
    assert closed["calls"] == 1
    assert (await call).status_code == 410
    assert bench.calls()[0].status is CallStatus.ABANDONED
    assert (await execution.chat(HELLO)).status_code == 410
    assert await bench.admin("DELETE", "/admin/executions/e1") == closed
    state = await bench.state()
    assert (state["live"], state["waiting"], state["open"]) == (0, 0, 0)


async def test_capacity_is_kept_and_the_line_is_in_order(bench, engine, script, say) -> None:
    await bench.cell("a", engine, capacity=1)
    opened = [await bench.open(f"e{number}") for number in range(3)]
    script.say(*(say(f"r{number}") for number in range(4)))
    assert (await opened[0].chat(HELLO)).status_code == 200
    waiting = []
    for number in (1, 2):
        waiting.append(asyncio.create_task(opened[number].chat(HELLO)))
        await bench.until(lambda state, number=number: state["waiting"] == number)
    assert (await opened[0].chat(HELLO)).status_code == 200  # its place is its own
    await bench.admin("DELETE", "/admin/executions/e0")
    assert (await waiting[0]).status_code == 200
    assert not waiting[1].done()
    await bench.admin("DELETE", "/admin/executions/e1")
    assert (await waiting[1]).status_code == 200
    assert bench.calls("e2")[0].waited_s > 0


async def test_a_cell_serves_only_its_version(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open(version=3)
    script.say(say("an answer"))
    call = asyncio.create_task(execution.chat(HELLO))
    await bench.until(lambda state: state["waiting"] == 1)
    engine.version = 3
    await bench.cell("a", engine)
    assert (await call).status_code == 200
    assert bench.calls()[0].spans[0].version == 3
    assert engine.requests[0]["extra_key"] == "3"


async def test_nothing_serves_within_the_limit(make_bench) -> None:
    async with make_bench(call_limit_s=2) as bench:
        execution = await bench.open()
        response = await execution.chat(HELLO)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.json()["error"]["code"] == "unavailable"
        streamed = await execution.chat(HELLO, stream=True)
        assert streamed.status_code == 200 and '"code":"unavailable"' in streamed.text
        calls = bench.calls()
        assert [call.finish_reason for call in calls] == ["unavailable"] * 2
        assert all(call.status is CallStatus.ABANDONED for call in calls)


async def test_stale_epochs_and_wrong_tokens_are_refused(bench, engine) -> None:
    await bench.cell("a", engine, epoch=5)
    headers = bench.headers
    url = f"{bench.url}/admin/cells/a"
    body = {"epoch": 4, "url": engine.url, "capacity": 1, "version": 0, "state": "serving"}
    assert (await bench.http.put(url, json=body, headers=headers)).status_code == 409
    assert (await bench.http.delete(f"{url}?epoch=4", headers=headers)).status_code == 409
    assert (await bench.http.put(url, json=body)).status_code == 401
    wrong = await bench.http.put(url, json={**body, "epoch": 6, "version": -1}, headers=headers)
    assert wrong.status_code == 400 and "version" in wrong.json()["error"]
    assert (await bench.http.delete(f"{url}?epoch=6", headers=headers)).json() == {"removed": True}
    assert (await bench.state())["cells"] == {}


async def test_metrics_count(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("one"), say("two"))
    await execution.reply(HELLO)
    await execution.reply([{"role": "user", "content": "anew"}])
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{bench.url}/metrics")).text
    assert 'gyre_gateway_calls_total{kind="main",status="complete"} 2.0' in text
    assert 'gyre_gateway_forks_total{reason="fresh history"} 1.0' in text
    assert "gyre_gateway_loop_lag_seconds" in text
    state = await bench.state()
    assert state["calls"] == 2
    assert state["tokens_out"] == sum(len(call.output_ids) for call in bench.calls())
