"""The internal form that every dialect is turned into and answered from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""A message in OpenAI's chat form, reduced to what can reach a prompt: ``role``, ``content`` (a
text), ``reasoning_content``, ``tool_calls``, ``tool_call_id``, ``name``."""

SYSTEM_MARK = "<system>\n"
"""How a system message in mid-history begins, which is shown as the user's."""

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
    json_schema: str | None = None
    """Schema, as JSON text, that the answer must fit."""
    constraint: Mapping[str, str] | None = None
    """What binds the output, in the engine's own parameters. Their grammar begins anew with each
    request, so a partial output under a constraint can't be gone on from."""


class Choice(StrEnum):
    """Whether a reply must call a tool. ``none`` has no word: its tools are left out."""

    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a client wants called; ``name`` is of a ``named`` tool."""

    choice: Choice = Choice.AUTO
    name: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call as a client asked for it."""

    model: str
    messages: list[Message]
    tools: list[Tool]
    sampling: Sampling
    stream: bool
    include_usage: bool
    tool_choice: ToolChoice = ToolChoice()
    hosted_tools: tuple[str, ...] = ()
    """Types of tools that a provider would run itself. Nobody does so here: the policy is not told
    of them."""


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

    call_id: str
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    usage: Usage
    stop_text: str | None = None
    """The stop text that ended the content."""

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


def settle(messages: list[Message]) -> list[Message]:
    """System messages where every template takes them: all that lead become the first message, and
    a later one becomes the user's, marked. Some templates refuse a system message anywhere else,
    and clients put them there."""
    lead = 0
    while lead < len(messages) and messages[lead]["role"] == "system":
        lead += 1
    head = messages[:lead]
    if lead > 1:
        text = "\n\n".join(message["content"] for message in head if message["content"])
        head = [{"role": "system", "content": text}]
    return [*head, *(_as_user(m) if m["role"] == "system" else m for m in messages[lead:])]


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": f"{SYSTEM_MARK}{message['content']}\n</system>"}
