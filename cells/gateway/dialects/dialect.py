"""What a dialect does: read a request, write its answer, whole or as a stream of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import orjson

from cells.gateway.forms import ChatRequest, RefusedError, Reply
from cells.gateway.seen import Seen

ARGUMENTS_PIECE = 2048
"""Characters of a tool's arguments in one event."""


class EventWriter(ABC):
    """The events of one streamed answer, in the order that clients expect.

    Text is given as it comes; ``end`` sends whatever of the reply was not sent by then, so a reply
    that is already there is written by ``start`` and ``end`` alone.
    """

    def __init__(self) -> None:
        self._sent = {"reasoning_content": 0, "content": 0}

    @abstractmethod
    def start(self) -> bytes:
        """Everything before the first text."""

    @abstractmethod
    def alive(self) -> bytes:
        """Something that keeps the connection, and says nothing."""

    @abstractmethod
    def error(self, error: RefusedError) -> bytes:
        """An error after the headers are gone."""

    def text(self, field: str, text: str) -> bytes:
        """More of ``content`` or ``reasoning_content``."""
        self._sent[field] += len(text)
        return self._text(field, text)

    def end(self, reply: Reply) -> bytes:
        """Everything that is left."""
        parts: list[bytes] = []
        for field, whole in (
            ("reasoning_content", reply.reasoning or ""),
            ("content", reply.content),
        ):
            rest = whole[self._sent[field] :]
            if rest:
                parts.append(self.text(field, rest))
        return b"".join([*parts, self._end(reply)])

    @abstractmethod
    def _text(self, field: str, text: str) -> bytes: ...

    @abstractmethod
    def _end(self, reply: Reply) -> bytes: ...


class Dialect(ABC):
    """One way to speak."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, body: bytes, seen: Seen | None = None) -> ChatRequest:
        """A request in the internal form. Unknown fields and any model name are accepted.

        Args:
            seen: histories of the same execution.

        Raises:
            RefusedError: 400, naming the field at fault.
        """

    @abstractmethod
    def whole(self, request: ChatRequest, reply: Reply) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def events(self, request: ChatRequest, call_id: str, prompt_tokens: int) -> EventWriter:
        """The writer of a streamed answer."""

    @abstractmethod
    def error(self, error: RefusedError) -> bytes:
        """The body of an error."""

    def refuses_in_stream(self, request: ChatRequest, error: RefusedError) -> bool:
        """Whether clients only understand an error when it is an event of a stream."""
        return False

    def status(self, error: RefusedError) -> int:
        """The HTTP status of an error."""
        return error.status


def pieces(text: str) -> Iterator[str]:
    """A text in pieces; nothing for an empty one."""
    for at in range(0, len(text), ARGUMENTS_PIECE):
        yield text[at : at + ARGUMENTS_PIECE]


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """One server-sent event, named as its type."""
    return b"event: " + str(body["type"]).encode() + b"\n" + event(body)
