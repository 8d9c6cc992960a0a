"""A gateway that was killed: what was recorded goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from cells.gateway.routing import Places
from cells.gateway.sessions import Sessions
from storage.layout import RunLayout
from storage.objects import Store
from tests.cells.gateway.conftest import LIMIT_S, Opened, prompts

HELLO = [{"role": "user", "content": "hello"}]
RUN = {"name": "run", "arguments": {"path": "a.py"}}


async def test_sessions_go_on_after_a_restart(make_bench, engine, script, say) -> None:
    script.say(say("", RUN), say("sub"), say("two"), say("three"), say("sub two"))
    async with make_bench() as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        first = await execution.reply(HELLO)
        sub = [{"role": "user", "content": "part"}]
        sub.append(await execution.reply(sub, agent="task-1"))
        tool = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "fine"}
        messages = [*HELLO, first, tool]
        messages.append(await execution.reply(messages))
        key, before = execution.key, bench.calls()
    async with make_bench() as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        assert execution.key == key
        seen = await bench.admin("GET", "/admin/executions/e1")
        assert seen["calls"] == 3
        more = {"role": "user", "content": "more"}
        await execution.reply([*messages, more])
        await execution.reply([*sub, more], agent="task-1")
        calls = bench.calls()
    assert calls[:3] == before
    assert [call.index for call in calls] == list(range(5))
    assert calls[3].parent == before[2].call_id and calls[3].fork_reason is None
    assert calls[4].parent == before[1].call_id and calls[4].fork_reason is None
    whole = prompts(calls)
    assert engine.requests[3]["input_ids"] == whole[calls[3].call_id]


async def test_a_closed_execution_can_be_opened_again(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("one"), say("two"))
    reply = await execution.reply(HELLO)
    await bench.admin("DELETE", "/admin/executions/e1")
    again = await bench.open()
    assert again.key == execution.key
    await again.reply([*HELLO, reply, {"role": "user", "content": "more"}])
    assert [call.fork_reason for call in bench.calls()] == [None, None]


async def test_a_torn_line_is_no_call(make_bench, engine, script, say) -> None:
    script.say(say("one"), say("two"))
    async with make_bench() as bench:
        await bench.cell("a", engine)
        await (await bench.open()).reply(HELLO)
        (key,) = bench.store.keys(bench.layout.calls("e1"))
        path = bench.store.local_path(key)
    path.write_bytes(path.read_bytes() + b'{"record": "Call", "form')
    async with make_bench() as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        await execution.reply([{"role": "user", "content": "more"}])
        assert [call.index for call in bench.calls()] == [0, 1]


async def test_a_client_goes_on_by_trying_again(make_bench, engine, script, say) -> None:
    """Nobody opens the execution a second time."""
    script.say(say("one"), say("two"))
    async with make_bench() as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        reply = await execution.reply(HELLO)
        await bench.open("e2")
        await bench.admin("DELETE", "/admin/executions/e2")
    async with make_bench() as bench:
        await bench.cell("a", engine)
        url = execution.base_url.replace(execution.base_url.split("/e/")[0], bench.url)
        again = Opened("e1", url, execution.key, bench.http)
        await again.reply([*HELLO, reply, {"role": "user", "content": "more"}])
        wrong = Opened("e1", url, "wrong", bench.http)
        assert (await wrong.chat(HELLO)).status_code == 401
        assert (await bench.admin("GET", "/admin/executions/e2"))["state"] == "closed"
        closed = await bench.admin("DELETE", "/admin/executions/e1")
        assert closed["calls"] == 2
    assert [call.fork_reason for call in bench.calls()] == [None, None]


async def test_a_killed_process_is_followed_by_another(
    gateway_process, engine, script, say
) -> None:
    """As a run starts it: kill -9 in mid-generation, the next one takes the same address."""
    script.say(say("one"), say("two"), say("two"))
    bench = await gateway_process.start()
    await bench.cell("a", engine)
    execution = await bench.open()
    reply = await execution.reply(HELLO)
    messages = [*HELLO, reply, {"role": "user", "content": "more"}]
    engine.hold_after = 1
    running = asyncio.create_task(execution.chat(messages))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    await gateway_process.kill()
    with pytest.raises(httpx.TransportError):
        await running
    await bench.http.aclose()
    engine.hold_after = None
    second = await gateway_process.start()
    try:
        assert second.url == bench.url
        await second.cell("a", engine)
        again = Opened("e1", execution.base_url, execution.key, second.http)
        await again.reply(messages)
        calls = second.calls()
        assert [call.fork_reason for call in calls] == [None, None]
        assert calls[1].parent == calls[0].call_id
        await second.stop()
        assert await asyncio.to_thread(gateway_process.process.wait, 20) == 0
    finally:
        await second.http.aclose()


async def test_executions_end_while_a_gateway_stops(tmp_path: Path) -> None:
    sessions = Sessions(Store(str(tmp_path)), RunLayout("run"), Places())
    names = [f"e{number}" for number in range(8)]
    for name in names:
        await sessions.start(name, 1.0, 0)
    await asyncio.gather(sessions.close(), *(sessions.end(name) for name in names))
    assert sessions.open == {}
    assert sessions.closed.keys() == set(names)
