"""The objects of OpenAI's responses: the request as it is kept, the response and its items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cells.gateway.dialects import fields
from cells.gateway.forms import ChatRequest, Finish, Reply, ToolCall, Usage


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a client knows a tool. A custom tool takes a text instead of JSON; the policy gets it as
    a function with the one argument ``input``."""

    name: str
    custom: bool = False
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ResponsesRequest(ChatRequest):
    """A request of this dialect."""

    spellings: Mapping[str, Spelling] = field(default_factory=dict)
    """By the name that the policy knows."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the answer repeats."""


def envelope(request: ResponsesRequest, call_id: str, created: int, status: str) -> dict[str, Any]:
    """A response without its output."""
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": None,
        "max_output_tokens": request.sampling.max_tokens,
        # Answers are recorded, but for training: none can be fetched by its id.
        "store": False,
        **request.echo,
    }


def finished(request: ResponsesRequest, reply: Reply, created: int) -> dict[str, Any]:
    """A response that has ended."""
    cut = reply.finish is Finish.LENGTH
    status = "incomplete" if cut else "completed"
    body = envelope(request, reply.call_id, created, status)
    if cut:
        body["incomplete_details"] = {"reason": "max_output_tokens"}
    return {**body, "output": items(request, reply, status), "usage": _usage(reply.usage)}


def items(request: ResponsesRequest, reply: Reply, status: str) -> list[dict[str, Any]]:
    """The output items of a reply: thinking, text, tool calls."""
    made: list[dict[str, Any]] = []
    if reply.reasoning:
        made.append(reasoning_item(reply.call_id, reply.reasoning))
    if reply.content:
        made.append(message_item(reply.call_id, reply.content, status))
    return [*made, *(call_item(request, call, call.arguments) for call in reply.tool_calls)]


def reasoning_item(call_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": f"rs_{call_id}", "type": "reasoning", "summary": [], "content": content}


def message_item(call_id: str, text: str, status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text)] if text else [],
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(request: ResponsesRequest, call: ToolCall, arguments: str) -> dict[str, Any]:
    """A tool call as the client knows the tool; with empty ``arguments`` one that begins."""
    spelling = request.spellings.get(call.name, Spelling(call.name))
    status = "completed" if arguments else "in_progress"
    made: dict[str, Any] = {"call_id": call.id, "name": spelling.name, "status": status}
    if spelling.custom:
        written = custom_input(arguments)
        return {"id": f"ctc_{call.id}", "type": "custom_tool_call", **made, "input": written}
    if spelling.namespace is not None:
        made["namespace"] = spelling.namespace
    return {"id": f"fc_{call.id}", "type": "function_call", **made, "arguments": arguments}


def custom_input(arguments: str) -> str:
    """The text for a custom tool: its one argument, or, where the policy wrote something else, just
    that."""
    value = fields.object_or_none(arguments)
    if value is not None and list(value) == ["input"] and isinstance(value["input"], str):
        return str(value["input"])
    return arguments


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        # Thinking is counted in the output, and not apart.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.output,
    }
