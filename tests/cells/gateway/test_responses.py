"""OpenAI's responses, as its own client and Codex see them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from cells.gateway.dialects.responses import ResponsesDialect
from cells.gateway.forms import RefusedError
from tests.cells.gateway.clients import CODEX_HEADERS, codex, codex_user
from tests.cells.gateway.conftest import LIMIT_S

TOOLS: list[Any] = [{"type": "function", "name": "write", "parameters": {"type": "object"}}]
WRITE = {"name": "write", "arguments": {"path": "a.py"}}


def client(execution) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=execution.base_url, api_key=execution.key, max_retries=0, timeout=LIMIT_S
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_official_client(bench, engine, script, say, stream) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("<think>hm</think>look", WRITE, WRITE), say("done"))
    kinds: list[str] = []
    numbers: list[int] = []

    async def ask(api, given, **more):
        asked = {"model": "m", "input": given, "tools": TOOLS, "instructions": "be good", **more}
        if not stream:
            return await api.responses.create(**asked)
        async with api.responses.stream(**asked) as events:
            async for event in events:
                kinds.append(event.type)
                numbers.append(event.sequence_number)
            return await events.get_final_response()

    async with client(execution) as api:
        first = await ask(api, "hello", max_output_tokens=300, store=True, metadata={"a": "b"})
        kind = [item.type for item in first.output]
        assert kind == ["reasoning", "message", "function_call", "function_call"]
        assert first.output[0].content[0].text == "hm"
        assert first.output_text == "look" and first.status == "completed"
        assert json.loads(first.output[2].arguments) == WRITE["arguments"]
        recorded = bench.calls()[0]
        assert first.usage.input_tokens == len(recorded.new_ids)
        assert first.usage.input_tokens_details.cached_tokens == len(recorded.new_ids) - 1
        assert first.usage.output_tokens == len(recorded.output_ids)
        assert (first.metadata, first.instructions) == ({"a": "b"}, "be good")
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
            for item in first.output
            if item.type == "function_call"
        ]
        echo = [item.model_dump(exclude_none=True) for item in first.output]
        second = await ask(api, [{"role": "user", "content": "hello"}, *echo, *results])
        assert second.output_text == "done"
        counted = await api.responses.input_tokens.count(
            model="m", input="hello", instructions="be good", tools=TOOLS
        )
        assert counted.input_tokens == len(recorded.new_ids)
    assert [call.fork_reason for call in bench.calls()] == [None, None]
    assert bench.calls()[1].parent == recorded.call_id
    if stream:
        once = kinds[: kinds.index("response.completed") + 1]
        assert once[:2] == ["response.created", "response.in_progress"]
        assert [kind for kind in once if kind.endswith("output_item.added")] == [
            "response.output_item.added"
        ] * 4
        order = ["reasoning_text.delta", "reasoning_text.done", "output_text.delta"]
        order += ["output_text.done", "function_call_arguments.delta", "completed"]
        places = [once.index(f"response.{kind}") for kind in order]
        assert places == sorted(places)
        assert numbers[: len(once)] == list(range(len(once)))


async def test_a_cut_response_is_incomplete(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("a long answer"))
    async with client(execution) as api:
        answer = await api.responses.create(model="m", input="hello", max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]


async def test_codex_requests_go_on_from_one_another(bench, engine, script, say) -> None:
    """Functions, custom tools and tools in a namespace come back under the names it gave."""
    await bench.cell("a", engine)
    execution = await bench.open()
    patch = {"name": "apply_patch", "arguments": {"input": "*** Begin\n+x"}}
    spawn = {"name": "agents.spawn", "arguments": {"path": "x"}}
    script.say(say("<think>so</think>", patch, spawn), say("ok"))
    headers = {**CODEX_HEADERS, "authorization": f"Bearer {execution.key}"}
    url = f"{execution.base_url}/responses"
    task = codex_user("write it")
    answer = await bench.http.post(url, json=codex([task]), headers=headers)
    done = [e["item"] for e in events(answer.text) if e["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "custom_tool_call", "function_call"]
    assert (done[1]["name"], done[1]["input"]) == ("apply_patch", "*** Begin\n+x")
    assert (done[2]["name"], done[2]["namespace"]) == ("spawn", "agents")
    typed = [e["type"] for e in events(answer.text)]
    assert "response.custom_tool_call_input.delta" in typed
    kept = {name: value for name, value in done[0].items() if name not in ("content", "id")}
    output = [{"type": "input_text", "text": "done"}]
    echo = [
        task,
        {**kept, "encrypted_content": None},
        {name: value for name, value in done[1].items() if name != "id"},
        {name: value for name, value in done[2].items() if name != "id"},
        {"type": "custom_tool_call_output", "call_id": done[1]["call_id"], "output": "done"},
        {"type": "function_call_output", "call_id": done[2]["call_id"], "output": output},
    ]
    await bench.http.post(url, json=codex(echo), headers=headers)
    calls = bench.calls()
    assert [call.fork_reason for call in calls] == [None, None]
    assert calls[1].parent == calls[0].call_id
    long = codex([codex_user("long " * 800)])
    full = await bench.http.post(url, json=long, headers=headers)
    last = events(full.text)[-1]
    assert (full.status_code, last["type"]) == (200, "response.failed")
    assert last["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_what_is_not_served_is_refused_by_name(more, word) -> None:
    with pytest.raises(RefusedError, match=word) as caught:
        ResponsesDialect().read(json.dumps({"input": "x", **more}).encode())
    assert caught.value.status == 400
