"""OpenAI's chat completions."""

from __future__ import annotations

import time
from typing import Any

import orjson

from cells.gateway.dialects import fields
from cells.gateway.dialects.dialect import Dialect, EventWriter, event, pieces
from cells.gateway.dialects.fields import bad, unserved
from cells.gateway.forms import (
    ChatRequest,
    Choice,
    Message,
    RefusedError,
    Reply,
    Sampling,
    Tool,
    ToolChoice,
    Usage,
    settle,
)
from cells.gateway.seen import Seen

DONE = b"data: [DONE]\n\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
_TEXTS = ("text", "refusal")


class ChatDialect(Dialect):
    """``POST /v1/chat/completions``."""

    name = "chat"

    def read(self, body: bytes, seen: Seen | None = None) -> ChatRequest:
        seen = seen or Seen()
        data = fields.load(body, "messages", seen)
        messages = fields.some(data, "messages")
        if data.get("n") not in (None, 1):
            raise unserved("only one choice is served", "n")
        options = data.get("stream_options")
        stream = data.get("stream") is True
        tools, hosted = _tools(data)
        choice = read_choice(data.get("tool_choice"), "function")
        return ChatRequest(
            model=fields.model(data),
            messages=settle(seen.read(messages, lambda *item: [_message(*item)])),
            tools=[] if choice is None else tools,
            sampling=_sampling(data),
            stream=stream,
            include_usage=stream
            and isinstance(options, dict)
            and options.get("include_usage") is True,
            tool_choice=choice or ToolChoice(),
            hosted_tools=hosted,
        )

    def whole(self, request: ChatRequest, reply: Reply) -> bytes:
        message = reply.message()
        if reply.tool_calls and not reply.content:
            message["content"] = None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": reply.finish.value,
        }
        body = _envelope(reply.call_id, request.model, "chat.completion")
        return orjson.dumps({**body, "choices": [choice], "usage": _usage(reply.usage)})

    def events(self, request: ChatRequest, call_id: str, prompt_tokens: int) -> EventWriter:
        return ChunkWriter(request, call_id)

    def error(self, error: RefusedError) -> bytes:
        return write_error(error)


class ChunkWriter(EventWriter):
    """Role, thinking, text, tool calls (name first, then arguments), finish, usage, end mark."""

    def __init__(self, request: ChatRequest, call_id: str) -> None:
        super().__init__()
        self._body = _envelope(call_id, request.model, "chat.completion.chunk")
        if request.include_usage:
            self._body["usage"] = None
        self._with_usage = request.include_usage

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def alive(self) -> bytes:
        return b": waiting\n\n"

    def error(self, error: RefusedError) -> bytes:
        return b"data: " + write_error(error) + b"\n\n"

    def _text(self, field: str, text: str) -> bytes:
        return self._chunk({field: text})

    def _end(self, reply: Reply) -> bytes:
        parts: list[bytes] = []
        for index, call in enumerate(reply.tool_calls):
            head = {
                "index": index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": ""},
            }
            parts.append(self._chunk({"tool_calls": [head]}))
            for piece in pieces(call.arguments):
                more = {"index": index, "function": {"arguments": piece}}
                parts.append(self._chunk({"tool_calls": [more]}))
        parts.append(self._chunk({}, reply.finish.value))
        if self._with_usage:
            parts.append(event({**self._body, "choices": [], "usage": _usage(reply.usage)}))
        return b"".join([*parts, DONE])

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event({**self._body, "choices": [choice]})


def write_error(error: RefusedError) -> bytes:
    """The body of an error in OpenAI's form."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error"}.get(error.status, kind)
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def read_choice(value: Any, inner: str | None) -> ToolChoice | None:
    """OpenAI's ``tool_choice``; None for ``none``.

    Args:
        inner: the field that holds the name in an object: of chat, or None where the name is in
            the object itself.
    """
    if value in (None, "auto"):
        return ToolChoice()
    if value == "none":
        return None
    if value == "required":
        return ToolChoice(Choice.REQUIRED)
    if isinstance(value, dict):
        holder = value if inner is None else value.get(inner, value)
        if isinstance(holder, dict) and isinstance(holder.get("name"), str):
            return ToolChoice(Choice.NAMED, holder["name"])
        if value.get("type") == "allowed_tools":
            return ToolChoice()
    raise bad("must be auto, none, required, or name a function", "tool_choice")


def _message(item: Any, index: int) -> Message:
    where = f"messages.{index}"
    item = fields.entry(item, where)
    role = item.get("role")
    if role == "assistant":
        return _assistant(item, where)
    if not isinstance(role, str) or role not in _ROLES:
        raise bad(f"must be one of {', '.join(_ROLES)}, assistant", f"{where}.role")
    content = fields.parts_text(item.get("content"), _TEXTS, f"{where}.content")
    message: Message = {"role": _ROLES[role], "content": content}
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        message["tool_call_id"] = item["tool_call_id"]
    if role == "tool" and isinstance(item.get("name"), str):
        message["name"] = item["name"]
    return message


def _assistant(item: dict[str, Any], where: str) -> Message:
    content = item.get("content")
    text = "" if content is None else fields.parts_text(content, _TEXTS, f"{where}.content")
    message: Message = {"role": "assistant", "content": text}
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    calls = item.get("tool_calls")
    if calls is None or calls == []:
        return message
    if not isinstance(calls, list):
        raise bad("must be a list", f"{where}.tool_calls")
    message["tool_calls"] = [
        _call(call, f"{where}.tool_calls.{index}") for index, call in enumerate(calls)
    ]
    return message


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad("must have a function with a name", where)
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise bad("must be a JSON text", f"{where}.function.arguments")
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools(data: dict[str, Any]) -> tuple[list[Tool], tuple[str, ...]]:
    tools: list[Tool] = []
    hosted: list[str] = []
    for index, tool in enumerate(fields.listed(data, "tools")):
        where = f"tools.{index}"
        kind = fields.maybe_text(fields.entry(tool, where), "type", "function")
        function = tool.get("function")
        if kind == "custom":
            raise unserved("custom tools are served at /v1/responses", where)
        if kind != "function":
            hosted.append(kind)
        elif not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad("must be a function with a name", where)
        else:
            fields.dumped(tool, where)
            tools.append(tool)
    return tools, tuple(hosted)


def _sampling(data: dict[str, Any]) -> Sampling:
    longest = "max_completion_tokens"
    if data.get(longest) is None:
        longest = "max_tokens"
    return Sampling(
        max_tokens=fields.whole(data, longest, 1, 1 << 31),
        temperature=fields.number(data, "temperature", 0, 10),
        top_p=fields.top_p(data),
        stop=fields.stops(data, "stop"),
        seed=fields.whole(data, "seed", -fields.SEEDS, fields.SEEDS - 1),
        json_schema=_json_schema(data.get("response_format")),
    )


def _json_schema(form: Any) -> str | None:
    kind = form.get("type") if isinstance(form, dict) else form
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if kind == "json_schema":
        inner = form.get("json_schema")
        if isinstance(inner, dict):
            return fields.schema(inner.get("schema"), "response_format.json_schema.schema")
    raise unserved("must be text, json_object or json_schema with a schema", "response_format")


def _envelope(call_id: str, model: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
