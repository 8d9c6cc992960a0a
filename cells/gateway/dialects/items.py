"""The input items of OpenAI's responses, as messages."""

from __future__ import annotations

from typing import Any

import orjson

from cells.gateway.dialects import fields
from cells.gateway.dialects.fields import bad, unserved
from cells.gateway.forms import Message

_ROLES = {"system": "system", "developer": "system", "user": "user"}
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def read_items(data: dict[str, Any]) -> list[Message]:
    """``instructions`` and ``input`` of a request.

    Raises:
        RefusedError: 400, naming the item at fault.
    """
    given = data.get("input")
    history = _History()
    instructions = data.get("instructions")
    if isinstance(instructions, str) and instructions:
        history.say("system", instructions)
    if isinstance(given, str):
        history.say("user", given)
        return history.messages
    for index, item in enumerate(fields.some(data, "input")):
        _take(history, fields.entry(item, f"input.{index}"), f"input.{index}")
    if not history.messages:
        raise bad("a message is needed", "input")
    return history.messages


class _History:
    """Messages that grow by items. Thinking, text and tool calls that follow one another are one
    turn of the assistant; in what this gateway sends they come in that order, so thinking or text
    after text or calls begins the next turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None

    def say(self, role: str, text: str) -> None:
        self._turn = None
        self.messages.append({"role": role, "content": text})

    def answer(self, call_id: str, text: str) -> None:
        self.say("tool", text)
        self.messages[-1]["tool_call_id"] = call_id

    def think(self, text: str) -> None:
        turn = self._own(new="reasoning_content")
        if text:
            turn["reasoning_content"] = text

    def write(self, text: str) -> None:
        self._own(new="content")["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._own().setdefault("tool_calls", []).append(call)

    def _own(self, new: str | None = None) -> Message:
        turn = self._turn
        begins = new is not None and turn is not None and (turn["content"] or "tool_calls" in turn)
        if turn is None or begins:
            self._turn = turn = {"role": "assistant", "content": ""}
            self.messages.append(turn)
        return turn


def _take(history: _History, item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role == "assistant":
            history.write(_text(item.get("content"), f"{where}.content"))
        elif isinstance(role, str) and role in _ROLES:
            history.say(_ROLES[role], _text(item.get("content"), f"{where}.content"))
        else:
            raise bad(f"must be one of {', '.join(_ROLES)}, assistant", f"{where}.role")
    elif kind == "reasoning":
        history.think(_reasoning(item, where))
    elif kind == "function_call":
        arguments = fields.text(item, "arguments", where)
        history.call(fields.maybe_text(item, "call_id"), _name(item, where), arguments)
    elif kind == "custom_tool_call":
        arguments = orjson.dumps({"input": fields.text(item, "input", where)}).decode()
        history.call(fields.maybe_text(item, "call_id"), _name(item, where), arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = _text(item.get("output"), f"{where}.output")
        history.answer(fields.maybe_text(item, "call_id"), output)
    else:
        raise unserved(f"items of type {kind!r} can't be read", where)


def _name(item: dict[str, Any], where: str) -> str:
    name, namespace = fields.text(item, "name", where), item.get("namespace")
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _text(content: Any, where: str) -> str:
    return fields.parts_text(content, _TEXTS, where)


def _reasoning(item: dict[str, Any], where: str) -> str:
    """What an item of thinking says. A client may keep the text, a summary of it, or neither."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            return _text(parts, f"{where}.{name}")
    return ""
