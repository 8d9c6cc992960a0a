"""Anthropic's messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from cells.gateway.dialects import fields
from cells.gateway.dialects.dialect import Dialect, EventWriter, named_event, pieces
from cells.gateway.dialects.fields import bad, unserved
from cells.gateway.forms import (
    ChatRequest,
    Choice,
    Finish,
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

BILLING = "x-anthropic-billing-header:"
"""How the block of a system prompt begins that Claude Code changes in mid-session. It tells a
provider who pays, and the policy nothing."""
UNPARSED = "__unparsedToolInput"
"""Where Claude Code puts arguments that it could not read as JSON."""
SIGNATURE = "Z3lyZQ=="
"""Clients want a signature on thinking and give it back; nothing here depends on it."""
OVERLOADED = 529
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    OVERLOADED: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class MessagesRequest(ChatRequest):
    """A request of this dialect. ``thinking``: whether the client takes thinking blocks; one that
    did not ask for any may read the first block as the text."""

    thinking: bool = False


class MessagesDialect(Dialect):
    """``POST /v1/messages``."""

    name = "messages"

    def read(self, body: bytes, seen: Seen | None = None) -> ChatRequest:
        seen = seen or Seen()
        data = fields.load(body, "messages", seen)
        messages: list[Message] = []
        system = _system(data.get("system"))
        if system:
            messages.append({"role": "system", "content": system})
        items = fields.some(data, "messages")
        messages += seen.read(items, lambda one, at: _turn(one, f"messages.{at}"))
        if not messages:
            raise bad("a message with content is needed", "messages")
        tools, hosted = _tools(data)
        choice = _choice(data.get("tool_choice"))
        thinking = data.get("thinking")
        return MessagesRequest(
            model=fields.model(data),
            messages=settle(messages),
            tools=[] if choice is None else tools,
            sampling=Sampling(
                max_tokens=fields.whole(data, "max_tokens", 1, 1 << 31),
                temperature=fields.number(data, "temperature", 0, 10),
                top_p=fields.top_p(data),
                stop=fields.stops(data, "stop_sequences"),
                json_schema=_json_schema(data),
            ),
            stream=data.get("stream") is True,
            include_usage=True,
            tool_choice=choice or ToolChoice(),
            hosted_tools=hosted,
            thinking=isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive"),
        )

    def whole(self, request: ChatRequest, reply: Reply) -> bytes:
        assert isinstance(request, MessagesRequest)
        content: list[dict[str, Any]] = []
        if reply.reasoning and request.thinking:
            thinking = {"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE}
            content.append(thinking)
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        for call in reply.tool_calls:
            value = fields.object_or_none(call.arguments)
            given = {UNPARSED: call.arguments} if value is None else value
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return orjson.dumps(
            {
                **_envelope(reply.call_id, request.model),
                "content": content,
                "stop_reason": _stop_reason(reply),
                "stop_sequence": reply.stop_text,
                "usage": _usage(reply.usage),
            }
        )

    def events(self, request: ChatRequest, call_id: str, prompt_tokens: int) -> EventWriter:
        assert isinstance(request, MessagesRequest)
        return BlockWriter(request, call_id, prompt_tokens)

    def error(self, error: RefusedError) -> bytes:
        kind = _ERRORS.get(self.status(error), "api_error" if error.status >= 500 else None)
        body = {"type": kind or "invalid_request_error", "message": error.message}
        return orjson.dumps({"type": "error", "error": body})

    def status(self, error: RefusedError) -> int:
        """A call that may be tried again is answered 529, which every client of this dialect takes
        as just that."""
        return OVERLOADED if error.status == 503 else error.status


class BlockWriter(EventWriter):
    """message_start, then block by block (start, deltas, stop): thinking, text, one for each tool
    call; then message_delta with why it ended and what it took, and message_stop."""

    def __init__(self, request: MessagesRequest, call_id: str, prompt_tokens: int) -> None:
        super().__init__()
        self._request = request
        self._call_id = call_id
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open = ""

    def start(self) -> bytes:
        message = {
            **_envelope(self._call_id, self._request.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # What was cached is only known at the end; message_delta says it.
            "usage": _usage(Usage(self._prompt_tokens, 0, 0)),
        }
        return named_event({"type": "message_start", "message": message}) + self.alive()

    def alive(self) -> bytes:
        return named_event({"type": "ping"})

    def error(self, error: RefusedError) -> bytes:
        return b"event: error\ndata: " + MessagesDialect().error(error) + b"\n\n"

    def _text(self, field: str, text: str) -> bytes:
        if field == "content":
            head = self._enter("text", {"type": "text", "text": ""})
            return head + self._delta({"type": "text_delta", "text": text})
        if not self._request.thinking:
            return b""
        head = self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return head + self._delta({"type": "thinking_delta", "thinking": text})

    def _end(self, reply: Reply) -> bytes:
        parts: list[bytes] = []
        for call in reply.tool_calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            parts.append(self._enter(call.id, block))
            for piece in pieces(call.arguments):
                parts.append(self._delta({"type": "input_json_delta", "partial_json": piece}))
        parts.append(self._leave())
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_text}
        parts.append(
            named_event({"type": "message_delta", "delta": delta, "usage": _usage(reply.usage)})
        )
        return b"".join([*parts, named_event({"type": "message_stop"})])

    def _enter(self, name: str, block: dict[str, Any]) -> bytes:
        """Open a block, unless it is the one that is open."""
        if self._open == name:
            return b""
        left = self._leave()
        self._open = name
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return left + named_event(start)

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = ""
        return signed + named_event({"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})


def _system(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        value = [part for part in value if not _is_billing(part)]
    return fields.parts_text(value, ("text",), "system", glue="\n\n")


def _is_billing(part: Any) -> bool:
    return isinstance(part, dict) and fields.maybe_text(part, "text").startswith(BILLING)


def _turn(item: Any, where: str) -> list[Message]:
    """One message of this dialect as those of the internal form: tool results stand for
    themselves, and what a user says beside them follows."""
    item = fields.entry(item, where)
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad("must be user, assistant or system", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad("must be a text or a list of blocks", f"{where}.content")
    if role == "assistant":
        return _assistant(content, f"{where}.content")
    results: list[Message] = []
    rest: list[Any] = []
    for index, block in enumerate(content):
        if role == "user" and isinstance(block, dict) and block.get("type") == "tool_result":
            results.append(_result(block, f"{where}.content.{index}"))
        else:
            rest.append(block)
    if not rest:
        return results
    text = fields.parts_text(rest, ("text",), f"{where}.content", glue="\n")
    return [*results, {"role": role, "content": text}]


def _result(block: dict[str, Any], where: str) -> Message:
    content = block.get("content")
    text = "" if content is None else fields.parts_text(content, ("text",), where, glue="\n")
    message: Message = {"role": "tool", "content": text}
    if isinstance(block.get("tool_use_id"), str):
        message["tool_call_id"] = block["tool_use_id"]
    return message


def _assistant(content: list[Any], where: str) -> list[Message]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        at = f"{where}.{index}"
        block = fields.entry(block, at)
        kind = block.get("type")
        if kind == "text":
            texts.append(fields.text(block, "text", at))
        elif kind == "thinking":
            thoughts.append(fields.text(block, "thinking", at))
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif kind != "redacted_thinking":
            raise unserved(f"blocks of type {kind!r} can't be read", at)
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise bad("must be an object", f"{where}.input")
    raw = given.get(UNPARSED)
    if isinstance(raw, dict):  # newer versions: with its length
        raw = raw.get("raw")
    arguments = raw if isinstance(raw, str) else fields.dumped(given, f"{where}.input")
    function = {"name": fields.text(block, "name", where), "arguments": arguments}
    return {"id": fields.maybe_text(block, "id"), "type": "function", "function": function}


def _tools(data: dict[str, Any]) -> tuple[list[Tool], tuple[str, ...]]:
    tools: list[Tool] = []
    hosted: list[str] = []
    for index, tool in enumerate(fields.listed(data, "tools")):
        where = f"tools.{index}"
        tool = fields.entry(tool, where)
        kind = fields.maybe_text(tool, "type", "custom")
        if kind != "custom":
            hosted.append(kind)
            continue
        name = fields.text(tool, "name", where)
        schema = tool.get("input_schema")
        tools.append(fields.function(name, tool.get("description"), schema, where))
    return tools, tuple(hosted)


def _choice(value: Any) -> ToolChoice | None:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind in (None, "auto"):
        return ToolChoice()
    if kind == "none":
        return None
    if kind == "any":
        return ToolChoice(Choice.REQUIRED)
    if kind == "tool" and isinstance(value.get("name"), str):
        return ToolChoice(Choice.NAMED, value["name"])
    raise bad("must be of type auto, any, none, or tool with a name", "tool_choice")


def _json_schema(data: dict[str, Any]) -> str | None:
    config = data.get("output_config")
    where, form = "output_format", data.get("output_format")
    if isinstance(config, dict) and config.get("format") is not None:
        where, form = "output_config.format", config["format"]
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise unserved("must be of type json_schema", where)
    return fields.schema(form.get("schema"), f"{where}.schema")


def _stop_reason(reply: Reply) -> str:
    if reply.finish is Finish.STOP:
        return "stop_sequence" if reply.stop_text is not None else "end_turn"
    return "max_tokens" if reply.finish is Finish.LENGTH else "tool_use"


def _envelope(call_id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }
