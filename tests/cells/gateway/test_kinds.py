"""What calls are for: by the headers of known harnesses, by shape for the others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest

from cells.gateway.dialects.chat import ChatDialect
from cells.gateway.dialects.messages import MessagesDialect
from cells.gateway.dialects.responses import ResponsesDialect
from cells.gateway.harnesses import HARNESSES
from cells.gateway.kinds import Origin, by_rules
from cells.gateway.matching import Branches
from storage.records import CallKind
from tests.cells.gateway.clients import (
    AGENT,
    CLAUDE_SUMMARY,
    CODEX_HEADERS,
    NESTED,
    SESSION,
    chat_tools,
    claude,
    claude_headers,
    claude_search,
    claude_title,
    codex,
    codex_user,
    opencode,
    qwen,
)

USER = {"role": "user", "content": "Write a.py with the function f."}
SAID = {"role": "assistant", "content": "I did."}


def origin(dialect: Any, body: dict[str, Any], headers: dict[str, str], *known: str) -> Origin:
    branches = Branches()
    for agent in known:
        branches.roots[agent] = {"role": "system", "content": agent}
    found = by_rules(HARNESSES, headers, dialect.read(orjson.dumps(body)), branches)
    assert found is not None
    return found


def ask_claude(body: dict[str, Any], **headers: str) -> Origin:
    named = {f"x-claude-code-{name}": value for name, value in headers.items()}
    return origin(MessagesDialect(), body, claude_headers(**named), "main", AGENT)


@pytest.mark.parametrize(
    ("body", "headers", "agent", "kind", "parent"),
    [
        (claude([USER]), {}, "main", CallKind.MAIN, None),
        (claude([USER, SAID, USER]), {}, "main", CallKind.MAIN, None),
        (claude([USER, SAID, CLAUDE_SUMMARY]), {}, "main", CallKind.MAIN_SUMMARY, None),
        (
            claude([USER, SAID, CLAUDE_SUMMARY, {"role": "system", "content": "Reminder."}]),
            {},
            "main",
            CallKind.MAIN_SUMMARY,
            None,
        ),
        (claude([USER]), {"agent-id": AGENT}, AGENT, CallKind.SUB_AGENT, "main"),
        (
            claude([USER]),
            {"agent-id": NESTED, "parent-agent-id": AGENT},
            NESTED,
            CallKind.SUB_AGENT,
            AGENT,
        ),
        (
            claude([USER, SAID, CLAUDE_SUMMARY]),
            {"agent-id": AGENT},
            AGENT,
            CallKind.SUB_AGENT_SUMMARY,
            "main",
        ),
        (claude_title(), {}, "background", CallKind.BACKGROUND, None),
        (claude_search(), {}, "background", CallKind.BACKGROUND, None),
        (
            claude([{"role": "user", "content": "Please summarise the text only in out.txt"}]),
            {},
            "main",
            CallKind.MAIN,
            None,
        ),
    ],
)
def test_claude_code(body, headers, agent, kind, parent) -> None:
    found = ask_claude(body, **headers)
    assert (found.agent, found.kind, found.parent) == (agent, kind, parent)
    assert found.reason.startswith("Claude Code: ")


@pytest.mark.parametrize(
    ("headers", "agent", "kind", "parent"),
    [
        ({}, "main", CallKind.MAIN, None),
        (
            {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})},
            "main",
            CallKind.MAIN_SUMMARY,
            None,
        ),
        (
            {
                "thread-id": "t2",
                "x-codex-parent-thread-id": SESSION,
                "x-openai-subagent": "collab_spawn",
            },
            "t2",
            CallKind.SUB_AGENT,
            "main",
        ),
        (
            {"thread-id": "t3", "x-codex-parent-thread-id": "t2"},
            "t3",
            CallKind.SUB_AGENT,
            "t2",
        ),
    ],
)
def test_codex(headers, agent, kind, parent) -> None:
    body = codex([codex_user("go")])
    found = origin(ResponsesDialect(), body, CODEX_HEADERS | headers, "main", "t2")
    assert (found.agent, found.kind, found.parent) == (agent, kind, parent)


TITLES = "You write titles.\n" + "- Rule.\n" * 40 + "- The language of what you are summarizing."


@pytest.mark.parametrize(
    ("body", "headers", "agent", "kind", "parent"),
    [
        (opencode([USER]), {}, "main", CallKind.MAIN, None),
        (
            opencode([USER]),
            {"x-session-id": "s2", "x-parent-session-id": "s1"},
            "s2",
            CallKind.SUB_AGENT,
            "main",
        ),
        (
            opencode(
                [{"role": "system", "content": "You write titles for talks."}, USER], tools=False
            ),
            {},
            "background",
            CallKind.BACKGROUND,
            None,
        ),
        (
            opencode([{"role": "system", "content": TITLES}, USER], tools=False),
            {},
            "background",
            CallKind.BACKGROUND,
            None,
        ),
        (
            opencode(
                [{"role": "system", "content": "You summarise talks."}, USER, SAID, USER],
                tools=False,
            ),
            {},
            "main",
            CallKind.MAIN_SUMMARY,
            None,
        ),
    ],
)
def test_opencode(body, headers, agent, kind, parent) -> None:
    found = origin(ChatDialect(), body, {"x-session-id": "s1"} | headers, "main")
    assert (found.agent, found.kind, found.parent) == (agent, kind, parent)


def test_labels_of_ones_own() -> None:
    headers = {"x-agent": "task-2", "x-agent-parent": "task-1", "x-agent-call": "summary"}
    found = origin(ChatDialect(), opencode([USER]), headers)
    assert (found.agent, found.kind) == ("task-2", CallKind.SUB_AGENT_SUMMARY)
    assert found.parent == "task-1"


async def test_calls_without_headers_are_told_by_shape(bench, engine, script, say) -> None:
    """Qwen Code: sub-agents by their opening, their parent by the task in its open call; a summary
    by its words; and what goes on from there is the same agent again."""
    await bench.cell("a", engine)
    execution = await bench.open()
    task = "Look for all the tests and list them."
    spawn = {"name": "task", "arguments": {"prompt": task, "n": 1}}
    script.say(say("", spawn), say("a list"), say("<state_snapshot>"), say("on"), say("Title"))
    url = f"{execution.base_url}/chat/completions"
    headers = {"authorization": f"Bearer {execution.key}", "user-agent": "QwenCode/0.15"}

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        answer = await bench.http.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    system = {"role": "system", "content": "You are an agent."}
    helper = {"role": "system", "content": "You look for things."}
    main = [system, USER]
    said = await ask(qwen(main, "write", "task", stream=False))
    await ask(qwen([helper, {"role": "user", "content": task}], "write", stream=False))
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a list"}
    compress = {"role": "user", "content": "First think, then write the <state_snapshot>."}
    await ask(qwen([*main, said, result, compress], stream=False))
    fresh = {"role": "user", "content": "<state_snapshot>so far</state_snapshot>"}
    await ask(qwen([system, fresh], "write", "task", stream=False))
    await ask(qwen([{"role": "user", "content": "A title, please."}], stream=False))
    calls = bench.calls()
    assert [(call.agent, call.kind, call.parent_agent) for call in calls] == [
        ("main", CallKind.MAIN, None),
        ("sub-1", CallKind.SUB_AGENT, "main"),
        ("main", CallKind.MAIN_SUMMARY, None),
        ("main", CallKind.MAIN, None),
        ("background", CallKind.BACKGROUND, None),
    ]
    assert all(call.kind_reason.startswith("shape: ") for call in calls)
    assert [call.parent for call in calls[:3]] == [None, None, calls[0].call_id]


async def test_no_agent_is_its_own_parent(bench, engine, script, say) -> None:
    """The first words of a sub-agent can tell of a folder that its own calls name too."""
    await bench.cell("a", engine)
    execution = await bench.open()
    look = {"name": "list", "arguments": {"path": "/workspace"}}
    script.say(say("", {"name": "task", "arguments": {"prompt": "x"}}), say("", look), say("done"))
    headers = {"authorization": f"Bearer {execution.key}"}

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        url = f"{execution.base_url}/chat/completions"
        answer = await bench.http.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    await ask(
        qwen([{"role": "system", "content": "You are an agent."}, USER], "task", stream=False)
    )
    told = {"role": "user", "content": "You are in /workspace."}
    sub = [{"role": "system", "content": "You look for things."}, told]
    said = await ask(qwen(sub, "list", stream=False))
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a.py"}
    await ask(qwen([*sub, said, result], "list", stream=False))
    found = [(call.agent, call.parent_agent) for call in bench.calls()]
    assert found == [("main", None), ("sub-1", "main"), ("sub-1", "main")]


async def test_a_title_beside_a_first_call_that_runs_is_background(
    bench, engine, script, say
) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("a long answer"), say("Title"))
    engine.hold_after = 1
    system = {"role": "system", "content": "You are an agent."}
    first = asyncio.create_task(
        execution.chat([system, USER], agent=None, tools=chat_tools("write"))
    )
    await asyncio.wait_for(engine.reached.wait(), 20)
    title = asyncio.create_task(
        execution.chat([{"role": "user", "content": "A title, please."}], agent=None)
    )
    await bench.until(lambda state: state["cells"]["a"]["in_flight"] == 2)
    engine.release.set()
    await asyncio.gather(first, title)
    assert [call.kind for call in bench.calls()] == [CallKind.MAIN, CallKind.BACKGROUND]
