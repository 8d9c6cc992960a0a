"""What clients do to a history between two calls: each edit splices, or forks with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cells.gateway import forks
from cells.gateway.forks import read_executions, report_forks
from tests.cells.gateway.conftest import prompts

SYSTEM = {"role": "system", "content": "Write the module."}
GO = {"role": "user", "content": "go"}
WRITE = {"name": "write", "arguments": {"path": "a.py", "n": 1.0}}
Edit = Callable[[list[dict]], list[dict]]


def of_replies(change: Callable[[dict], Any]) -> Edit:
    def edit(messages: list[dict]) -> list[dict]:
        copy = json.loads(json.dumps(messages))
        for message in copy:
            if message["role"] == "assistant":
                change(message)
        return copy

    return edit


def respell(message: dict) -> None:
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        arguments["n"] = 1
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))


def as_parts(messages: list[dict]) -> list[dict]:
    return [
        {**m, "content": [{"type": "text", "text": m["content"], "cache_control": {}}]}
        if m.get("content")
        else m
        for m in messages
    ]


def edit_call(message: dict) -> None:
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = '{"path": "b.py"}'


SPLICED: dict[str, Edit] = {
    "nothing": lambda messages: messages,
    "texts become parts with cache marks": as_parts,
    "arguments are spelled anew": of_replies(respell),
    "thinking is dropped": of_replies(lambda m: m.pop("reasoning_content", None)),
    "thinking is trimmed": of_replies(lambda m: m.update(reasoning_content="h")),
    "text is trimmed": of_replies(lambda m: m.update(content=f" {m['content'] or ''}\n")),
    "empty text becomes null": of_replies(lambda m: m.update(content=m["content"] or None)),
    "unknown fields come along": of_replies(lambda m: m.update(refusal=None, audio=None)),
}
FORKED: dict[str, tuple[Edit, str]] = {
    "an answer was changed": (of_replies(edit_call), "history edited"),
    "the system prompt was changed": (
        lambda messages: [{**SYSTEM, "content": "billing 2"}, *messages[1:]],
        "history edited",
    ),
    "the last answer was left out": (
        lambda messages: [*messages[:4], {"role": "user", "content": "Summarise."}],
        "earlier call",
    ),
    "a new history carries an answer over": (
        lambda messages: [SYSTEM, {"role": "user", "content": "Continue."}, *messages[4:]],
        "history edited",
    ),
    "the history begins anew": (
        lambda messages: [SYSTEM, {"role": "user", "content": "Continue."}],
        "fresh history",
    ),
}


async def conversation(execution, script, say) -> list[dict]:
    """Two turns with a tool, and the question of a third."""
    script.say(say("<think>hm</think>look", WRITE), say("<think>hm</think>", WRITE), say("done"))
    messages = [SYSTEM, GO]
    for _ in range(2):
        reply = await execution.reply(messages)
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "ok"}
        messages += [reply, result]
    return messages


def assert_prefix(calls) -> None:
    whole = prompts(calls)
    by_id = {call.call_id: call for call in calls}
    for call in calls:
        if call.parent is not None:
            before = whole[call.parent] + list(by_id[call.parent].output_ids)
            assert whole[call.call_id][: call.kept] == before[: call.kept]


@pytest.mark.parametrize("edit", SPLICED)
async def test_a_known_edit_splices(bench, engine, script, say, edit) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    await execution.reply(SPLICED[edit](await conversation(execution, script, say)))
    calls = bench.calls()
    assert [call.fork_reason for call in calls] == [None] * 3
    assert [call.parent for call in calls[1:]] == [call.call_id for call in calls[:2]]
    assert_prefix(calls)
    report = report_forks(read_executions(bench.store, bench.layout))
    assert (report.first, report.continued, report.forks) == (1, 2, {})
    assert report.unexplained == () and report.continued_share == 1


@pytest.mark.parametrize("edit", FORKED)
async def test_another_history_forks_with_its_reason(
    bench, engine, script, say, edit, monkeypatch, capsys
) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    change, reason = FORKED[edit]
    await execution.reply(change(await conversation(execution, script, say)))
    calls = bench.calls()
    assert calls[2].fork_reason is not None and calls[2].fork_reason.startswith(reason)
    assert_prefix(calls)
    monkeypatch.setattr("sys.argv", ["forks", "--root", bench.store.url, "--run", "r1"])
    forks.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["forks"] == {reason: 1} and printed["unexplained"] == []
    assert (printed["calls"], printed["first"], printed["continued"]) == (3, 1, 1)


@pytest.mark.parametrize("restart", [False, True])
async def test_an_empty_reply_that_is_left_out_is_spliced(
    make_bench, engine, script, say, restart
) -> None:
    script.say(say("  "), say("now"), say("more"))
    async with make_bench() as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        await execution.reply([SYSTEM, GO])
        messages = [SYSTEM, GO, {"role": "user", "content": "well?"}]
        messages.append(await execution.reply(messages))
        messages.append(GO)
        if not restart:
            await execution.reply(messages)
    if restart:
        async with make_bench() as bench:
            await bench.cell("a", engine)
            await (await bench.open()).reply(messages)
    calls = bench.calls()
    assert [call.fork_reason for call in calls] == [None] * 3
    assert [call.parent for call in calls[1:]] == [call.call_id for call in calls[:2]]
    assert_prefix(calls)
    assert engine.requests[2]["input_ids"] == prompts(calls)[calls[2].call_id]
