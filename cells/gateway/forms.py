"""The internal form that every dialect is turned into and answered from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""A message in OpenAI's chat form, reduced to what can reach a prompt: ``role``, ``content`` (a
text), ``reasoning_content``, ``tool_calls``, ``tool_call_id``, ``name``."""

Tool = dict[str, Any]
"""A tool in OpenAI's form: ``{"type": "function", "function": {...}}``."""


class RefusedError(Exception):
    """A request that gets an error answer; each dialect words it in its own form.

    Args:
        status: HTTP status.
        code: short name of the fault.
        message: what is wrong and what to do.
        param: the field at fault.
        retry_after_s: when it makes sense to try again.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a client asked of the sampler; None leaves it to the execution or the context."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call as a client asked for it."""

    model: str
    messages: list[Message]
    tools: list[Tool]
    sampling: Sampling
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in a reply; ``arguments`` is a JSON text."""

    id: str
    name: str
    arguments: str


class Finish(StrEnum):
    """Why a reply ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a call."""

    prompt: int
    cached: int
    output: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The assistant message that a client gets."""

    message_id: str
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    usage: Usage

    def message(self) -> Message:
        """The reply as a client is expected to echo it."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message
