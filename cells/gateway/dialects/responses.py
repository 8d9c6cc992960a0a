"""OpenAI's responses: the request, and the answer in one piece."""

from __future__ import annotations

import time
from typing import Any

import orjson

from cells.gateway.dialects import fields
from cells.gateway.dialects.chat import read_choice, write_error
from cells.gateway.dialects.dialect import Dialect, EventWriter
from cells.gateway.dialects.fields import unserved
from cells.gateway.dialects.items import read_items
from cells.gateway.dialects.responses_events import ItemWriter
from cells.gateway.dialects.responses_objects import ResponsesRequest, Spelling, finished
from cells.gateway.forms import (
    ChatRequest,
    RefusedError,
    Reply,
    Sampling,
    Tool,
    ToolChoice,
    settle,
)
from cells.gateway.seen import Seen

_ELSEWHERE = {
    "previous_response_id": "responses are not kept for this; send the whole input",
    "conversation": "conversations are not kept; send the whole input",
    "prompt": "stored prompts are not served; send the input",
}
_ECHOED = ("instructions", "metadata", "reasoning", "temperature", "text", "top_p", "user")


class ResponsesDialect(Dialect):
    """``POST /v1/responses``."""

    name = "responses"

    def read(self, body: bytes, seen: Seen | None = None) -> ChatRequest:
        data = fields.load(body, "input", seen or Seen())
        for name, why in _ELSEWHERE.items():
            if data.get(name) is not None:
                raise unserved(why, name)
        if data.get("background") is True:
            raise unserved("only answers that are waited for are served", "background")
        tools, hosted, spellings = _tools(data)
        choice = read_choice(data.get("tool_choice"), None)
        messages = read_items(data)
        stream = data.get("stream") is True
        return ResponsesRequest(
            model=fields.model(data),
            messages=settle(messages),
            tools=[] if choice is None else tools,
            sampling=Sampling(
                max_tokens=fields.whole(data, "max_output_tokens", 1, 1 << 31),
                temperature=fields.number(data, "temperature", 0, 10),
                top_p=fields.top_p(data),
                stop=fields.stops(data, "stop"),
                seed=fields.whole(data, "seed", -fields.SEEDS, fields.SEEDS - 1),
                json_schema=_json_schema(data.get("text")),
            ),
            stream=stream,
            include_usage=True,
            tool_choice=choice or ToolChoice(),
            hosted_tools=hosted,
            spellings=spellings,
            echo=_echo(data),
        )

    def whole(self, request: ChatRequest, reply: Reply) -> bytes:
        assert isinstance(request, ResponsesRequest)
        return orjson.dumps(finished(request, reply, int(time.time())))

    def events(self, request: ChatRequest, call_id: str, prompt_tokens: int) -> EventWriter:
        assert isinstance(request, ResponsesRequest)
        return ItemWriter(request, call_id)

    def refuses_in_stream(self, request: ChatRequest, error: RefusedError) -> bool:
        # Codex compacts when it reads this code in an event; a status of 400 ends it.
        return request.stream and error.code == "context_length_exceeded"

    def error(self, error: RefusedError) -> bytes:
        return write_error(error)


def _tools(data: dict[str, Any]) -> tuple[list[Tool], tuple[str, ...], dict[str, Spelling]]:
    tools: list[Tool] = []
    hosted: list[str] = []
    spellings: dict[str, Spelling] = {}

    def take(tool: Any, where: str, namespace: str | None) -> None:
        tool = fields.entry(tool, where)
        kind = fields.maybe_text(tool, "type", "function")
        if kind == "namespace" and namespace is None:
            inside = fields.text(tool, "name", where)
            for number, inner in enumerate(fields.listed(tool, "tools")):
                take(inner, f"{where}.tools.{number}", inside)
            return
        if kind not in ("function", "custom"):
            hosted.append(kind)
            return
        name = fields.text(tool, "name", where)
        known = f"{namespace}.{name}" if namespace else name
        parameters = _INPUT if kind == "custom" else tool.get("parameters")
        tools.append(fields.function(known, tool.get("description"), parameters, where))
        if kind == "custom" or namespace:
            spellings[known] = Spelling(name, kind == "custom", namespace)

    for index, tool in enumerate(fields.listed(data, "tools")):
        take(tool, f"tools.{index}", None)
    return tools, tuple(hosted), spellings


_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def _json_schema(text: Any) -> str | None:
    form = text.get("format") if isinstance(text, dict) else None
    kind = form.get("type") if isinstance(form, dict) else form
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if kind == "json_schema" and isinstance(form, dict):
        return fields.schema(form.get("schema"), "text.format.schema")
    raise unserved("must be text, json_object or json_schema with a schema", "text.format")


def _echo(data: dict[str, Any]) -> dict[str, Any]:
    echo: dict[str, Any] = {}
    for name in _ECHOED:
        fields.dumped(data.get(name), name)
        echo[name] = data.get(name)
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        if data.get(name) is not None:
            fields.dumped(data[name], name)
            echo[name] = data[name]
    return echo
