"""Exact ids: what was sampled is spliced, never tokenised again."""

from __future__ import annotations

import asyncio
import json

from cells.gateway.codec import Codec
from storage.records import CallKind, CallStatus
from tests.cells.gateway.conftest import prompts
from tests.engines.scripted import logprob

SYSTEM = {"role": "system", "content": "Write the module."}
WRITE = {"name": "write", "arguments": {"path": "a.py", "content": "x = 1.0\n", "n": 1.0}}


def tool(message: dict, content: str = "ok a.py") -> dict:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}


def assert_exact(bench, engine, execution: str = "e1") -> None:
    """The engine saw exactly the recorded prompts, each continued one beginning with the ids of the
    call that it extends, and everything sampled is recorded."""
    calls = bench.calls(execution)
    whole = prompts(calls)
    seen = [request["input_ids"] for request in engine.requests]
    for call in calls:
        prompt = whole[call.call_id]
        assert prompt in seen
        if call.parent is not None:
            parent = next(one for one in calls if one.call_id == call.parent)
            before = whole[parent.call_id] + list(parent.output_ids)
            assert call.kept == len(before)
            assert prompt[: len(before)] == before
        expected = [logprob(len(prompt) + at, token) for at, token in enumerate(call.output_ids)]
        assert list(call.output_logprobs) == expected
        assert [(s.version, s.start, s.end) for s in call.spans] == [(0, 0, len(call.output_ids))]


async def test_turns_extend_sampled_ids(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("", WRITE), say("<think>hm</think>", WRITE), say("all done"))
    messages = [SYSTEM, {"role": "user", "content": "file: a.py"}]
    for _ in range(2):
        reply = await execution.reply(messages)
        messages += [reply, tool(reply)]
    last = await execution.reply(messages)
    assert last["content"] == "all done"
    assert_exact(bench, engine)
    calls = bench.calls()
    assert [call.fork_reason for call in calls] == [None] * 3
    assert [call.parent for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    assert all(call.status is CallStatus.COMPLETE for call in calls)
    assert engine.requests[0]["extra_key"] == "0"


async def test_arguments_compare_as_json_values(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("", WRITE), say("ok"))
    messages = [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "go"}]}]
    reply = await execution.reply(messages)
    echoed = json.loads(json.dumps(reply))
    function = echoed["tool_calls"][0]["function"]
    arguments = json.loads(function["arguments"])
    arguments["n"] = 1
    function["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    echoed["extra"] = True
    del echoed["content"]
    opening = [SYSTEM, {"role": "user", "content": "go"}]
    await execution.reply([*opening, echoed, tool(reply)])
    assert bench.calls()[1].fork_reason is None
    assert_exact(bench, engine)


async def test_text_turns_match_by_content(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("  <think>plan</think>first "), say("second"))
    messages = [{"role": "user", "content": "hello"}]
    reply = await execution.reply(messages)
    assert reply["reasoning_content"] == "plan"
    echo = {"role": "assistant", "content": "first\n"}
    await execution.reply([*messages, echo, {"role": "user", "content": "more"}])
    assert bench.calls()[1].fork_reason is None
    assert_exact(bench, engine)


async def test_cut_off_turn_is_closed_behind_what_was_sampled(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("a long answer"), say("more"))
    messages = [{"role": "user", "content": "hello"}]
    response = await execution.chat(messages, max_tokens=4)
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 4
    await execution.reply([*messages, choice["message"], {"role": "user", "content": "go on"}])
    calls = bench.calls()
    assert calls[1].parent == calls[0].call_id
    assert_exact(bench, engine)


async def test_edited_history_forks_with_its_reason(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("", WRITE), say("", WRITE), say("end"))
    messages = [SYSTEM, {"role": "user", "content": "go"}]
    first = await execution.reply(messages)
    messages += [first, tool(first)]
    second = await execution.reply(messages)
    edited = json.loads(json.dumps(second))
    edited["tool_calls"][0]["function"]["arguments"] = '{"path": "b.py"}'
    await execution.reply([*messages, edited, tool(second)])
    calls = bench.calls()
    assert calls[2].parent is None and calls[2].kept == 0
    assert calls[2].fork_reason == "history edited: message 4 was not sampled here"
    assert_exact(bench, engine)


async def test_edited_opening_forks(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("one"), say("two"))
    reply = await execution.reply([SYSTEM, {"role": "user", "content": "go"}])
    opening = [{"role": "system", "content": "Other."}, {"role": "user", "content": "go"}]
    await execution.reply([*opening, reply, {"role": "user", "content": "x"}])
    calls = bench.calls()
    assert calls[1].fork_reason == f"history edited: message 0 differs from {calls[0].call_id}"


async def test_going_back_forks_from_the_earlier_call(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("one"), say("two"), say("three"))
    messages = [{"role": "user", "content": "go"}]
    messages.append(await execution.reply(messages))
    await execution.reply([*messages, {"role": "user", "content": "x"}])
    await execution.reply([*messages, {"role": "user", "content": "y"}])
    calls = bench.calls()
    assert calls[2].parent == calls[0].call_id
    assert calls[2].fork_reason == f"earlier call: goes on from {calls[0].call_id}"
    assert_exact(bench, engine)


async def test_compaction_starts_a_fresh_history(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("one"), say("short"), say("two"))
    messages = [SYSTEM, {"role": "user", "content": "go"}]
    messages.append(await execution.reply(messages))
    ask = {"role": "user", "content": "Context limit. Summarise."}
    summary = await execution.reply([*messages, ask], kind="summary")
    fresh = [SYSTEM, {"role": "user", "content": f"Continue.\n{summary['content']}"}]
    await execution.reply(fresh)
    calls = bench.calls()
    assert [call.kind for call in calls] == [
        CallKind.MAIN,
        CallKind.MAIN_SUMMARY,
        CallKind.MAIN,
    ]
    assert [call.fork_reason for call in calls] == [None, None, "fresh history"]
    assert_exact(bench, engine)


async def test_sub_agents_run_at_once_and_stay_apart(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(*(say(f"r{number}") for number in range(7)))
    main = [SYSTEM, {"role": "user", "content": "go"}]
    main.append(await execution.reply(main))
    same = [SYSTEM, {"role": "user", "content": "part"}]
    first, second = await asyncio.gather(
        execution.reply(same, agent="task-1"), execution.reply(same, agent="task-2")
    )
    more = {"role": "user", "content": "more"}
    await asyncio.gather(
        execution.reply([*same, first, more], agent="task-1"),
        execution.reply([*same, second, more], agent="task-2"),
        execution.reply([*main, more]),
    )
    calls = bench.calls()
    assert all(call.fork_reason is None for call in calls)
    by_agent = {
        agent: [c for c in calls if c.agent == agent] for agent in ("main", "task-1", "task-2")
    }
    for agent, own in by_agent.items():
        assert len(own) == 2
        assert own[1].parent == own[0].call_id
        kind = CallKind.MAIN if agent == "main" else CallKind.SUB_AGENT
        assert all(call.kind is kind for call in own)
    assert_exact(bench, engine)


async def test_shape_tells_agents_apart_without_headers(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("", WRITE), *(say(f"r{number}") for number in range(5)))
    tools = [{"type": "function", "function": {"name": "write", "parameters": {}}}]
    main = [SYSTEM, {"role": "user", "content": "go"}]
    main.append(await execution.reply(main, agent=None, tools=tools))
    main.append(tool(main[-1]))
    helper = [{"role": "system", "content": "You help."}, {"role": "user", "content": "part"}]
    await execution.reply(helper, agent=None, tools=tools)
    title = [{"role": "system", "content": "Name it."}, {"role": "user", "content": "go"}]
    await execution.reply(title, agent=None)
    ask = {"role": "user", "content": "Summarize the conversation."}
    await execution.reply([*main, ask], agent=None, tools=tools)
    await execution.reply([SYSTEM, {"role": "user", "content": "Continue."}], agent=None)
    assert [(call.agent, call.kind.value) for call in bench.calls()] == [
        ("main", "main"),
        ("sub-1", "sub-agent"),
        ("background", "background"),
        ("main", "main-summary"),
        ("main", "main"),
    ]


async def test_refused_bridge_forks_and_goes_on(make_bench, tokenizer, engine, script, say) -> None:
    qwen = Codec(tokenizer, "qwen3")  # drops thinking at a new user turn, so it will not bridge
    assert qwen.tools_matter
    async with make_bench(renderer=qwen) as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        script.say(say("one"), say("two"), say("three"))
        messages = [{"role": "user", "content": "go"}]
        messages.append(await execution.reply(messages))
        messages.append({"role": "user", "content": "x"})
        messages.append(await execution.reply(messages))
        tools = [{"type": "function", "function": {"name": "t", "parameters": {}}}]
        await execution.reply([*messages, {"role": "user", "content": "y"}], tools=tools)
        calls = bench.calls()
        assert calls[1].fork_reason == (
            f"bridge refused: thinking is dropped when the user says more, after {calls[0].call_id}"
        )
        assert calls[2].fork_reason == f"tools changed: after {calls[1].call_id}"
        assert_exact(bench, engine)
