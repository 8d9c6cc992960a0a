"""Schemas and demanded tools, from each dialect to the engine's grammar."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cells.gateway.codec import Codec, load_codec
from cells.gateway.dialects.chat import ChatDialect
from cells.gateway.dialects.messages import MessagesDialect
from cells.gateway.dialects.responses import ResponsesDialect
from cells.gateway.forms import RefusedError
from cells.gateway.grammar import Grammar
from tests.cells.gateway.clients import chat_tools
from tests.cells.gateway.conftest import LIMIT_S
from tests.cells.gateway.test_real_engine import put

USER = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "write"}}


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (
            ChatDialect(),
            {
                "messages": USER,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                },
            },
        ),
        (
            ResponsesDialect(),
            {
                "input": "hello",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            },
        ),
        (
            MessagesDialect(),
            {
                "messages": USER,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
        ),
        (
            MessagesDialect(),
            {"messages": USER, "output_format": {"type": "json_schema", "schema": SCHEMA}},
        ),
    ],
)
def test_schemas_are_read_in_each_dialect(dialect, body) -> None:
    sampling = dialect.read(json.dumps(body).encode()).sampling
    assert json.loads(sampling.json_schema) == SCHEMA


def bound(codec: Codec, prompt: list[int], **more: Any) -> dict[str, Any] | None:
    body = {"messages": USER, **more}
    made = Grammar(codec).bind(ChatDialect().read(json.dumps(body).encode()), prompt)
    if made is None or "structural_tag" not in made:
        return made
    return json.loads(made["structural_tag"])["format"]


def test_thinking_may_come_first(codec, tokenizer) -> None:
    prompt = tokenizer.encode("assistant\n")
    form = {"response_format": {"type": "json_object"}}
    free = bound(codec, prompt, **form)
    assert free["elements"][0]["type"] == "optional"
    assert free["elements"][1] == {"type": "json_schema", "json_schema": {"type": "object"}}
    opened = bound(codec, [*prompt, *tokenizer.encode("<think>\n")], **form)
    assert opened["elements"][0]["elements"][0]["begin"] == ""
    assert bound(codec, prompt) is None


def test_demanded_tools(codec, tokenizer) -> None:
    tools = chat_tools("write", "run")
    named = bound(codec, [0], tools=tools, tool_choice=NAMED)["elements"][1]
    (tag,) = named["tags"]
    assert tag["begin"] == '<tool_call>\n{"name": "write", "arguments": '
    assert named["at_least_one"] is True
    some = bound(codec, [0], tools=tools, tool_choice="required")["elements"][1]
    assert len(some["tags"]) == 2
    either = bound(codec, [0], tools=tools, response_format={"type": "json_object"})
    assert [part["type"] for part in either["elements"][1]["elements"]] == [
        "tags_with_separator",
        "json_schema",
    ]
    with pytest.raises(RefusedError, match="tool 'write'"):
        bound(codec, [0], tool_choice=NAMED)


async def test_a_partial_output_under_a_schema_is_sampled_anew(
    bench, engine, other, script, say
) -> None:
    """The next cell's grammar begins anew, and the client has seen nothing yet."""
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say('{"ok": true}'), say('{"ok": false}'))
    engine.hold_after = 3
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    call = asyncio.create_task(execution.chat(USER, stream=True, response_format=form))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    await bench.cell("b", other)
    await bench.cell("a", engine, state="leaving")
    assert (await call).status_code == 200
    first, again = engine.requests[0], other.requests[0]
    assert again["input_ids"] == first["input_ids"]
    assert "structural_tag" in again["sampling_params"]
    (recorded,) = bench.calls()
    assert recorded.spans[-1].end == len(recorded.output_ids) == len(recorded.output_logprobs)


@pytest.mark.real
def test_xgrammar_takes_what_fits_and_nothing_else(codec, tokenizer) -> None:
    """The library that SGLang binds outputs with reads the tags as they are meant."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    flag = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"]}
    tool = {"type": "function", "function": {"name": "write", "parameters": flag}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": flag}}
    answer = '{"ok": "yes"}'
    call = f'<tool_call>\n{{"name": "write", "arguments": {answer}}}\n</tool_call>'
    free, opened = tokenizer.encode("assistant\n"), tokenizer.encode("<think>\n")
    cases: list[tuple[dict[str, Any], list[int], list[str], list[str]]] = [
        ({"response_format": form}, free, [answer, f"<think>a</think>\n\n{answer}"], ["a", call]),
        ({"response_format": form}, opened, [f"a</think>\n\n{answer}"], [answer]),
        (
            {"response_format": form, "tools": [tool]},
            free,
            [answer, call, f"{call}\n{call}", f"<think>a</think>{call}"],
            ["a"],
        ),
        ({"tools": [tool], "tool_choice": "required"}, free, [call], [answer, ""]),
    ]
    for body, prompt, good, wrong in cases:
        format_ = bound(codec, prompt, **body)
        tag = json.dumps({"type": "structural_tag", "format": format_})
        grammar = xgrammar.Grammar.from_structural_tag(tag)
        assert [accepts(grammar, text) for text in good] == [True] * len(good), body
        assert [accepts(grammar, text) for text in wrong] == [False] * len(wrong), body


@pytest.mark.real
async def test_a_real_engine_keeps_to_them(make_bench, sglang_server, tiny_policy) -> None:
    """A policy of random weights answers in the form that is asked for."""
    codec = load_codec(tiny_policy, "cells.gateway.terse:TerseRenderer")
    flag = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"]}
    tool = {"type": "function", "function": {"name": "write", "parameters": flag}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": flag}}
    async with make_bench(renderer=codec) as bench:
        await put(bench, sglang_server, "serving", 1)
        execution = await bench.open()
        said = await execution.reply(
            [*USER, {"role": "user", "content": "1"}], max_tokens=400, response_format=form
        )
        thought = said.get("reasoning_content")
        call = await execution.chat(USER, max_tokens=400, tools=[tool], tool_choice="required")
        choice = call.json()["choices"][0]
    if bench.calls()[0].finish_reason == "stop":
        assert json.loads(said["content"])["ok"] in ("yes", "no"), (said, thought)
    if choice["finish_reason"] == "tool_calls":
        used = choice["message"]["tool_calls"][0]["function"]
        assert used["name"] == "write"
        assert json.loads(used["arguments"])["ok"] in ("yes", "no")
    assert {call.finish_reason for call in bench.calls()} <= {"stop", "length", "tool_calls"}
