"""Text for a client while the output is still growing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cells.gateway.codec import Codec
from cells.gateway.forms import Tool

FIELDS = ("reasoning_content", "content")


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop text, and whether there was one. The ids of a stop text were
    sampled and stay recorded; the client does not see it."""
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return (text[: min(found)].rstrip(), True) if found else (text, False)


class TextStream:
    """Sends text as soon as nothing that follows can change it.

    Args:
        emit: called with ``reasoning_content`` or ``content`` and more of its text.
    """

    def __init__(
        self,
        codec: Codec,
        prompt: list[int],
        tools: list[Tool],
        stops: Sequence[str],
        emit: Callable[[str, str], None],
    ) -> None:
        self._codec = codec
        self._prompt = prompt
        self._tools = tools
        self._stops = stops
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._emit = emit
        self._next = 1
        self.sent = dict.fromkeys(FIELDS, "")

    def feed(self, ids: list[int]) -> None:
        """Take all output ids so far. Steps grow with the output, so that reading it over and over
        costs a constant factor only."""
        if len(ids) < self._next:
            return
        self._next = len(ids) + max(4, len(ids) // 16)
        parsed = self._codec.parse(ids, self._prompt, self._tools, final=False)
        content, stopped = cut_at_stop(parsed.content, self._stops)
        if not stopped and self._hold:
            content = content[: -self._hold]
        for field, text in zip(FIELDS, (parsed.reasoning or "", content), strict=True):
            # Edges may still be trimmed, and half a character decodes to a replacement.
            self._advance(field, text.strip().rstrip("\ufffd").rstrip())

    def finish(self, reasoning: str, content: str) -> tuple[str, str]:
        """Send the rest, and return both texts as they were delivered: where the whole output reads
        differently from its parts, what was sent stands."""
        for field, text in zip(FIELDS, (reasoning, content), strict=True):
            self._advance(field, text)
        return self.sent["reasoning_content"], self.sent["content"]

    def _advance(self, field: str, text: str) -> None:
        sent = self.sent[field]
        if len(text) > len(sent) and text.startswith(sent):
            self._emit(field, text[len(sent) :])
            self.sent[field] = text
