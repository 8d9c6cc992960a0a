"""The dialect of OpenAI's chat completions."""

from __future__ import annotations

import time
from typing import Any

import orjson

from cells.gateway.forms import (
    ChatRequest,
    Message,
    RefusedError,
    Reply,
    Sampling,
    Tool,
    Usage,
)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
_STOPS = 16
_STOP_LENGTH = 256
_SEEDS = 1 << 63


def read_request(body: bytes) -> ChatRequest:
    """A request body in the internal form. Unknown fields and any model name are accepted.

    Raises:
        RefusedError: 400, naming the field at fault.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: {error}", None) from None
    if not isinstance(data, dict):
        raise _bad("the body must be an object", None)
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("a non-empty list is needed", "messages")
    if data.get("n") not in (None, 1):
        raise _bad("only one choice is served", "n")
    form = data.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise _bad("only text is served", "response_format")
    options = data.get("stream_options")
    stream = data.get("stream") is True
    return ChatRequest(
        model=data["model"] if isinstance(data.get("model"), str) else "policy",
        messages=[_message(item, index) for index, item in enumerate(messages)],
        tools=_tools(data),
        sampling=_sampling(data),
        stream=stream,
        include_usage=stream and isinstance(options, dict) and options.get("include_usage") is True,
    )


def write_reply(reply: Reply, model: str) -> bytes:
    """The body of an answer that is not streamed."""
    message = reply.message()
    if reply.tool_calls and not reply.content:
        message["content"] = None
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish.value}
    body = _envelope(reply.message_id, model, "chat.completion")
    return orjson.dumps({**body, "choices": [choice], "usage": _usage(reply.usage)})


class ChunkWriter:
    """The chunks of one streamed answer, in the order that clients expect: role, thinking, text,
    tool calls (name first, then arguments), finish, usage, end mark."""

    def __init__(self, message_id: str, request: ChatRequest) -> None:
        self._body = _envelope(message_id, request.model, "chat.completion.chunk")
        if request.include_usage:
            self._body["usage"] = None
        self._with_usage = request.include_usage

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, field: str, text: str) -> bytes:
        """More of ``content`` or ``reasoning_content``."""
        return self._chunk({field: text})

    def end(self, reply: Reply) -> bytes:
        """Everything after the text."""
        parts: list[bytes] = []
        for index, call in enumerate(reply.tool_calls):
            head = {
                "index": index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": ""},
            }
            arguments = {"index": index, "function": {"arguments": call.arguments}}
            parts += [self._chunk({"tool_calls": [head]}), self._chunk({"tool_calls": [arguments]})]
        parts.append(self._chunk({}, reply.finish.value))
        if self._with_usage:
            parts.append(_event({**self._body, "choices": [], "usage": _usage(reply.usage)}))
        return b"".join([*parts, DONE])

    def error(self, error: RefusedError) -> bytes:
        """An error after the headers are gone."""
        return b"data: " + write_error(error) + b"\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event({**self._body, "choices": [choice]})


def write_error(error: RefusedError) -> bytes:
    """The body of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status, kind)
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


def write_models(names: list[str]) -> bytes:
    """The list of models; any name is served by the same policy."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "gyre"} for name in names]
    return orjson.dumps({"object": "list", "data": models})


def _message(item: Any, index: int) -> Message:
    where = f"messages.{index}"
    if not isinstance(item, dict):
        raise _bad("must be an object", where)
    role = item.get("role")
    if role == "assistant":
        return _assistant(item, where)
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"must be one of {', '.join(_ROLES)}, assistant", f"{where}.role")
    message: Message = {"role": _ROLES[role], "content": _text(item.get("content"), where)}
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        message["tool_call_id"] = item["tool_call_id"]
    if role == "tool" and isinstance(item.get("name"), str):
        message["name"] = item["name"]
    return message


def _assistant(item: dict[str, Any], where: str) -> Message:
    content = item.get("content")
    message: Message = {
        "role": "assistant",
        "content": "" if content is None else _text(content, where),
    }
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    calls = item.get("tool_calls")
    if calls is None or calls == []:
        return message
    if not isinstance(calls, list):
        raise _bad("must be a list", f"{where}.tool_calls")
    message["tool_calls"] = [
        _call(call, f"{where}.tool_calls.{index}") for index, call in enumerate(calls)
    ]
    return message


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad("must have a function with a name", where)
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise _bad("must be a JSON text", f"{where}.function.arguments")
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad("must be a text or a list of text parts", f"{where}.content")
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") in ("text", "refusal"):
            text = part.get(part["type"])
            if isinstance(text, str):
                texts.append(text)
                continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise _bad(
            f"parts of type {kind!r} can't be read: this policy takes text",
            f"{where}.content.{index}",
        )
    return "".join(texts)


def _tools(data: dict[str, Any]) -> list[Tool]:
    tools = data.get("tools")
    if tools is None or data.get("tool_choice") == "none":
        return []
    if not isinstance(tools, list):
        raise _bad("must be a list", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad("must be a function with a name", f"tools.{index}")
    return tools


def _sampling(data: dict[str, Any]) -> Sampling:
    longest = "max_completion_tokens"
    if data.get(longest) is None:
        longest = "max_tokens"
    stop = data.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > _STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= _STOP_LENGTH for text in stops)
    ):
        raise _bad(f"must be at most {_STOPS} texts of 1 to {_STOP_LENGTH} characters", "stop")
    max_tokens = _whole(data, longest, 1, 1 << 31)
    top_p = _number(data, "top_p", 0, 1)
    if top_p == 0:
        raise _bad("must be above 0", "top_p")
    return Sampling(
        max_tokens=max_tokens,
        temperature=_number(data, "temperature", 0, 10),
        top_p=1.0 if top_p is None else top_p,
        stop=tuple(stops),
        seed=_whole(data, "seed", -_SEEDS, _SEEDS - 1),
    )


def _whole(data: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(f"must be a whole number from {low} to {high}", name)
    return value


def _number(data: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _bad(f"must be a number from {low:g} to {high:g}", name)
    return float(value)


def _bad(message: str, param: str | None) -> RefusedError:
    text = message if param is None else f"{param}: {message}"
    return RefusedError(400, "invalid_value", text, param=param)


def _envelope(message_id: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": message_id, "object": kind, "created": int(time.time()), "model": model}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
