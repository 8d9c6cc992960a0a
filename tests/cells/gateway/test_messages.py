"""Anthropic's messages, as its own client and Claude Code see them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from cells.gateway.dialects.messages import MessagesDialect
from cells.gateway.forms import RefusedError
from tests.cells.gateway.clients import claude, claude_headers
from tests.cells.gateway.conftest import LIMIT_S

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [{"name": "write", "input_schema": {"type": "object"}}]
WRITE = {"name": "write", "arguments": {"path": "a.py", "n": 1.0}}


def client(execution) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=execution.base_url.removesuffix("/v1"),
        api_key=execution.key,
        max_retries=0,
        timeout=LIMIT_S,
    )


def results(message) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": content}
            for block, content in zip(
                (block for block in message.content if block.type == "tool_use"),
                ("ok", [{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}]),
                strict=False,
            )
        ],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_official_client(bench, engine, script, say, stream) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("<think>hm</think>look", WRITE, WRITE), say("done"), say("never mind"))
    asked: dict[str, Any] = {
        "model": "claude-anything",
        "max_tokens": 300,
        "system": "be good",
        "tools": TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    kinds: list[str] = []

    async def ask(api, messages):
        if not stream:
            return await api.messages.create(messages=messages, **asked)
        async with api.messages.stream(messages=messages, **asked) as events:
            async for event in events:
                kinds.append(event.type)
            return await events.get_final_message()

    async with client(execution) as api:
        first = await ask(api, HELLO)
        assert [block.type for block in first.content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        assert first.content[0].thinking == "hm" and first.content[1].text == "look"
        assert first.content[2].input == WRITE["arguments"]
        assert first.stop_reason == "tool_use"
        recorded = bench.calls()[0]
        usage = first.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == len(recorded.new_ids)
        assert usage.cache_read_input_tokens == len(recorded.new_ids) - 1
        assert usage.output_tokens == len(recorded.output_ids)
        echoed = {"role": "assistant", "content": [b.model_dump() for b in first.content]}
        second = await ask(api, [*HELLO, echoed, results(first)])
        assert (second.content[0].text, second.stop_reason) == ("done", "end_turn")
        assert [m.id async for m in await api.models.list()] == ["policy"]
        assert (await api.models.retrieve("whatever")).id == "whatever"
        counted = await api.messages.count_tokens(
            model="x", messages=HELLO, system="be good", tools=TOOLS
        )
        assert counted.input_tokens == len(recorded.new_ids)
    assert [call.fork_reason for call in bench.calls()] == [None, None]
    assert bench.calls()[1].parent == recorded.call_id
    if stream:
        blocks = [kind for kind in kinds if kind.startswith("content_block_st")]
        assert blocks == ["content_block_start", "content_block_stop"] * 5
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        assert kinds[-2] == "message_delta" and "input_json" in kinds


async def test_stop_reasons(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("one END two"), say("a long answer"), say("<think>x</think>plain"))
    async with client(execution) as api:
        asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 50}
        stopped = await api.messages.create(**asked, stop_sequences=["END"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
        assert stopped.content[0].text == "one"
        more = {"top_p": 0.5, "temperature": 0.2}  # which its newest client has no names for
        cut = await api.messages.create(**asked | {"max_tokens": 4}, extra_body=more)
        assert cut.stop_reason == "max_tokens"
        sampling = engine.requests[1]["sampling_params"]
        assert (sampling["top_p"], sampling["temperature"]) == (0.5, 0.2)
        plain = await api.messages.create(**asked)
        assert [block.type for block in plain.content] == ["text"]  # it asked for no thinking


async def test_claude_codes_requests_go_on_from_one_another(bench, engine, script, say) -> None:
    """Its re-spelled arguments, cache marks, late system messages and billing line fork nothing."""
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("<think>I think</think>", WRITE), say("broken"), say("ok"))
    url = f"{execution.base_url}/messages?beta=true"
    headers = claude_headers(authorization=f"Bearer {execution.key}")

    async def ask(messages: list[dict], **more: Any) -> list[dict]:
        body = claude(messages, **more)
        answer = await bench.http.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return [json.loads(line[6:]) for line in answer.text.split("\n") if line[:6] == "data: "]

    first = [{"role": "user", "content": [{"type": "text", "text": "write it"}]}]
    events = await ask(first)
    (use,) = (e["content_block"] for e in events if e.get("content_block", {}).get("id"))
    said = [
        {"type": "thinking", "thinking": "I think", "signature": "x"},
        {**use, "input": {"n": 1, "path": "a.py"}, "caller": {"type": "direct"}},
    ]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "ok", "is_error": False}
    history = [
        {"role": "user", "content": "write it"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "A note in mid-history."},
    ]
    await ask(history, system=claude([])["system"][1:])
    calls = bench.calls()
    assert [call.fork_reason for call in calls] == [None, None]
    assert calls[1].parent == calls[0].call_id
    assert {call.agent for call in calls} == {"main"}


@pytest.mark.parametrize("unparsed", ['{"a": ', {"raw": '{"a": ', "len": 6}])
def test_unparsed_arguments_are_read_as_they_were_written(unparsed: object) -> None:
    use = {"type": "tool_use", "id": "t", "name": "w", "input": {"__unparsedToolInput": unparsed}}
    body = {"messages": [{"role": "assistant", "content": [use]}]}
    (message,) = MessagesDialect().read(json.dumps(body).encode()).messages
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": '


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ([{"type": "image", "source": {"type": "base64", "data": "x"}}], "image"),
        ([{"type": "document", "source": {}}], "document"),
        ([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}], "image"),
    ],
)
def test_what_is_no_text_is_refused_by_name(content, word) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    with pytest.raises(RefusedError, match=word) as caught:
        MessagesDialect().read(json.dumps(body).encode())
    assert caught.value.status == 400


async def test_errors_are_in_anthropics_form(make_bench, engine, script, say) -> None:
    async with make_bench(calls_per_execution=1) as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        script.say(say("a long answer"))
        async with client(execution) as api:
            asked: dict[str, Any] = {"model": "m", "max_tokens": 9}
            with pytest.raises(anthropic.BadRequestError) as bad:
                await api.messages.create(**asked, messages=[])
            assert bad.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
                await api.messages.create(
                    **asked, messages=[{"role": "user", "content": "long " * 800}]
                )
            with pytest.raises(anthropic.AuthenticationError):
                await api.with_options(api_key="wrong").messages.create(**asked, messages=HELLO)
            with pytest.raises(anthropic.NotFoundError):
                await api.post("/v1/nothing", cast_to=object, body={})
            engine.hold_after = 1
            running = asyncio.create_task(api.messages.create(**asked, messages=HELLO))
            await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
            with pytest.raises(anthropic.APIStatusError) as busy:
                await api.messages.create(
                    **asked, messages=[{"role": "user", "content": "something else"}]
                )
            assert busy.value.status_code == 529
            assert busy.value.response.headers["retry-after"] == "1"
            assert busy.value.body["error"]["type"] == "overloaded_error"
            engine.release.set()
            await running


async def test_hello(bench) -> None:
    execution = await bench.open()
    base = execution.base_url.removesuffix("/v1")
    assert (await bench.http.head(f"{base}/api/hello")).status_code == 200
