"""A gateway that was killed: what was recorded goes on."""

from __future__ import annotations

import json

from tests.cells.gateway.conftest import prompts

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
        await execution.reply(HELLO)
        assert [call.index for call in bench.calls()] == [0, 1]


async def test_a_killed_gateways_port_is_taken_again(make_bench, tmp_path) -> None:
    from cells.gateway.server import choose_port
    from configs.run import RunConfig

    async with make_bench() as bench:
        store, layout = bench.store, bench.layout
        registration = json.loads(store.read(layout.host("gateway")))
    store.write(layout.host("gateway"), json.dumps(registration).encode())
    port = int(registration["url"].rsplit(":", 1)[1])
    assert choose_port(store, layout, RunConfig(), "gateway") == port
    assert choose_port(store, layout, RunConfig(), "elsewhere") == 0
