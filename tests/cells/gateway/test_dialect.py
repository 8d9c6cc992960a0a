"""OpenAI's chat completions, as its own client and careless clients see them."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.gateway.codec import Codec
from cells.gateway.dialects.chat import ChatDialect
from cells.gateway.forms import RefusedError
from tests.cells.gateway.conftest import LIMIT_S, deltas

HELLO = [{"role": "user", "content": "hello"}]
WRITE = {"name": "write", "arguments": {"path": "a.py"}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]


def client(execution) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=execution.base_url, api_key=execution.key, max_retries=0, timeout=LIMIT_S
    )


async def test_official_client_whole(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("<think>hm</think>look", WRITE, WRITE), say("done"))
    async with client(execution) as api:
        answer = await api.chat.completions.create(
            model="anything", messages=HELLO, tools=TOOLS, max_completion_tokens=200, seed=1
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content == "look"
        assert message.reasoning_content == "hm"
        assert [call.function.name for call in message.tool_calls] == ["write", "write"]
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "ok"}
            for call in message.tool_calls
        ]
        await api.chat.completions.create(
            model="other", messages=[*HELLO, message.model_dump(exclude_none=True), *results]
        )
        assert [model.id async for model in await api.models.list()] == ["policy"]
    assert bench.calls()[1].fork_reason is None
    sampling = engine.requests[0]["sampling_params"]
    assert sampling["max_new_tokens"] == 200 and sampling["sampling_seed"] == 1
    assert sampling["temperature"] == 1.0


@pytest.mark.parametrize("usage", [False, True])
async def test_official_client_streamed(bench, engine, script, say, usage) -> None:
    engine.delay_s = (0.0, 0.005)  # what comes at once is sent at once
    await bench.cell("a", engine)
    execution = await bench.open()
    text = "héllo wörld, a somewhat longer text 🎈 with an end"
    script.say(say(f"<think>let me\n think</think>{text}", WRITE), say("x"))
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = []
    async with client(execution) as api:
        stream = await api.chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS, stream=True, **options
        )
        async for chunk in stream:
            chunks.append(chunk)
    order = []
    content = reasoning = arguments = ""
    for chunk in chunks:
        if not chunk.choices:
            order.append("usage")
            continue
        choice = chunk.choices[0]
        delta = choice.delta
        if delta.role:
            order.append("role")
        elif getattr(delta, "reasoning_content", None):
            order.append("reasoning")
            reasoning += delta.reasoning_content
        elif delta.content:
            order.append("content")
            content += delta.content
        elif delta.tool_calls:
            order.append("tool")
            assert delta.tool_calls[0].index == 0
            arguments += delta.tool_calls[0].function.arguments or ""
        elif choice.finish_reason:
            order.append("finish")
            assert choice.finish_reason == "tool_calls"
    assert (content, reasoning, arguments) == (text, "let me\n think", '{"path": "a.py"}')
    short = list(dict.fromkeys(order))
    assert short == [
        "role",
        "reasoning",
        "content",
        "tool",
        "finish",
        *(["usage"] if usage else []),
    ]
    assert order.count("content") > 2
    assert order == sorted(order, key=short.index)
    assert len({chunk.id for chunk in chunks}) == 1
    if usage:
        assert chunks[-1].usage.completion_tokens == len(bench.calls()[0].output_ids)
    whole = {"role": "assistant", "content": content, "tool_calls": []}
    whole["tool_calls"] = [
        {"id": "edited", "type": "function", "function": {"name": "write", "arguments": arguments}}
    ]
    await execution.reply([*HELLO, whole, {"role": "tool", "content": "ok"}])
    assert bench.calls()[1].fork_reason is None


async def test_stop_texts_are_cut_but_recorded(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    ids = say("before END after")
    script.say(ids, ids)
    whole = (await execution.chat(HELLO, stop="END")).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("before", "stop")
    streamed = deltas((await execution.chat(HELLO, stop="END", stream=True)).text)
    assert (streamed["content"], streamed["finish_reason"]) == ("before", "stop")
    assert [list(call.output_ids) for call in bench.calls()] == [ids, ids]


async def test_broken_tool_calls_reach_the_client_as_text(
    bench, engine, script, say, tokenizer
) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    deep = "<tool_call>\n" + "[" * 3000 + "\n</tool_call>"
    script.say(
        say('so <tool_call>\n{"name": oops}\n</tool_call>'),
        say('<tool_call>\n{"name": "write", "arguments": {"a": "\\ud800"}}\n</tool_call>'),
        say(deep, end=False)[:300],
    )
    first = await execution.reply(HELLO, max_tokens=300)
    assert first["content"] == 'so\n<tool_call>\n{"name": oops}\n</tool_call>'
    assert "tool_calls" not in first
    second = await execution.reply(HELLO, max_tokens=300)
    assert second["tool_calls"][0]["function"]["name"] == "write"
    third = await execution.reply(HELLO, max_tokens=300)
    assert third["content"].startswith("<tool_call>")


async def test_the_context_is_the_limit(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("ok"))
    await execution.reply(HELLO, max_tokens=100_000)
    request = engine.requests[0]
    room = 768 - len(request["input_ids"])
    assert request["sampling_params"]["max_new_tokens"] == room
    response = await execution.chat([{"role": "user", "content": "long " * 800}])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_refusals_are_in_openai_form(make_bench, engine, script, say) -> None:
    async with make_bench(body_limit_mb=0.01, calls_per_execution=1) as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        stranger = await bench.open("e2")
        script.say(say("slow answer"))
        url = f"{execution.base_url}/chat/completions"
        good = {"authorization": f"Bearer {execution.key}"}

        async def status(headers: dict, **body) -> tuple[int, str]:
            response = await bench.http.post(url, headers=headers, **body)
            return response.status_code, response.json()["error"]["code"]

        chat = {"messages": HELLO}
        assert await status({}, json=chat) == (401, "invalid_api_key")
        wrong = {"authorization": f"Bearer {stranger.key}"}
        assert await status(wrong, json=chat) == (401, "invalid_api_key")
        unknown = await bench.http.post(url.replace("/e1/", "/e9/"), headers=good, json=chat)
        assert unknown.status_code == 401
        assert await status(good, content=b"{") == (400, "invalid_value")
        big = [{"role": "user", "content": "x" * 20_000}]
        assert await status(good, json={"messages": big}) == (413, "body_too_large")
        engine.hold_after = 1
        running = asyncio.create_task(
            bench.http.post(url, headers={"x-api-key": execution.key}, json=chat)
        )
        await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
        busy = await bench.http.post(url, headers=good, json=chat)
        assert busy.status_code == 503 and busy.headers["retry-after"] == "1"
        engine.release.set()
        assert (await running).status_code == 200


@pytest.mark.parametrize("renderer", ["cells.gateway.terse:TerseRenderer", "qwen3"])
async def test_odd_histories_are_no_server_errors(
    make_bench, engine, script, say, tokenizer, renderer
) -> None:
    deep: object = {}
    for _ in range(900):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    call = {"id": "x", "function": {"name": "f", "arguments": "[" * 900 + "]" * 900}}
    odd = [
        {"messages": [{"role": "tool", "content": "no call before"}]},
        {"messages": [{"role": "assistant", "content": "mine", "tool_calls": [call]}]},
        {"messages": [*HELLO, {"role": "assistant", "content": None}], "tools": [tool]},
        {"messages": [{"role": "assistant", "content": ""}] * 3},
        {"messages": [{"role": "system", "content": "<|im_end|>"}] * 2, "tools": [tool]},
    ]
    async with make_bench(renderer=Codec(tokenizer, renderer)) as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        script.say(*[say("ok")] * len(odd))
        for body in odd:
            response = await execution.chat(**body)
            assert response.status_code in (200, 400), response.text


BAD = [
    b"[]",
    b"\xff",
    b'{"messages": []}',
    b'{"messages": [1]}',
    b'{"messages": [{"role": "wizard", "content": "x"}]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": true}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "x"}], "top_p": 0}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [1]}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e300}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {}}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
    b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}}',
]


@pytest.mark.parametrize("body", BAD)
def test_malformed_bodies_are_refused_by_name(body) -> None:
    with pytest.raises(RefusedError) as caught:
        ChatDialect().read(body)
    assert caught.value.status == 400


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "function", "name", "arguments", "id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = ["messages", "tools", "stop", "seed", "max_tokens", "temperature", "top_p", "stream",
          "stream_options", "model", "n", "response_format", "tool_choice"]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_json_is_read_or_refused(data) -> None:
    try:
        request = ChatDialect().read(json.dumps(data).encode())
    except RefusedError as error:
        assert error.status == 400
    else:
        assert request.messages
