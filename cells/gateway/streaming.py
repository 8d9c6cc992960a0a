"""Text for a client while the output is still growing.

Reading the whole output again for every token would cost its square. Where the policy's thinking
and tool calls are marked by tokens of their own, text between two marks only grows: what a mark
opens is read once, and then each token once. Elsewhere the whole is read again at growing
distances, which costs a constant factor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cells.gateway.codec import Codec
from cells.gateway.forms import Tool

THINKING, CONTENT = FIELDS = ("reasoning_content", "content")
_BROKEN = "\ufffd"
CHARACTER_IDS = 4
"""Most ids of one character: of more, what does not decode never will."""


TEXT_EVERY_S = 0.02
"""How long ids wait for more before their text goes. Each piece costs the gateway, the network and
the client a turn, and nobody reads faster."""


class Gathered:
    """Hands ids on in larger pieces, none later than ``TEXT_EVERY_S``."""

    def __init__(self, take: Callable[[list[int]], None]) -> None:
        self._take = take
        self._ids: list[int] = []
        self._due: asyncio.TimerHandle | None = None

    def put(self, ids: list[int]) -> None:
        self._ids += ids
        if self._due is None and ids:
            self._due = asyncio.get_running_loop().call_later(TEXT_EVERY_S, self._hand_on)

    def drop(self) -> None:
        """Forget what was not handed on."""
        self._ids = []
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _hand_on(self) -> None:
        ids, self._ids, self._due = self._ids, [], None
        self._take(ids)


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop text, and which that was, if any. The ids of a stop text were
    sampled and stay recorded; the client does not see it."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position].rstrip(), stop


class TextStream:
    """Sends text as soon as nothing that follows can change it.

    Args:
        prompt: ids that the output follows; the newest part will do.
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
        self._ids: list[int] = []
        self._read = 0
        """Ids of which the text is taken."""
        self._due = 1
        self._open: str | None = None
        """The field that grows now; None where text goes nowhere, as inside a tool call."""
        self._held = dict.fromkeys(FIELDS, "")
        self._sent: dict[str, list[str]] = {field: [] for field in FIELDS}
        self._stopped = False

    @property
    def sent(self) -> tuple[str, str]:
        """Thinking and content as they were sent."""
        return "".join(self._sent[THINKING]), "".join(self._sent[CONTENT])

    def feed(self, ids: list[int]) -> None:
        """Take more output ids."""
        marked = not self._ids or not self._codec.marks.isdisjoint(ids)
        self._ids += ids
        if not self._codec.marks_show:
            self._read_again()
        elif marked:
            self._pass_mark()
        else:
            self._grow()

    def finish(self, reasoning: str, content: str) -> tuple[str, str]:
        """Send the rest, and return both texts as they were delivered: where the whole output reads
        differently from its parts, what was sent stands."""
        for field, text in zip(FIELDS, (reasoning, content), strict=True):
            self._advance(field, text)
        return self.sent

    def _pass_mark(self) -> None:
        """Take what came before the newest mark, and see which field is open behind it."""
        start = len(self._ids)
        while start and self._ids[start - 1] not in self._codec.marks:
            start -= 1
        self._read = len(self._ids)
        self._open = None
        if start and (start < self._due or self._ids[start - 1] in self._codec.stop_ids):
            return  # marks upon marks are read when their number has grown, the end by ``finish``
        self._due = start + start // 16
        before = self._ids[:start]
        parsed, self._open = self._codec.read_open(before, self._prompt, self._tools)
        self._advance(THINKING, (parsed.reasoning or "").strip())
        self._advance(CONTENT, self._settled(parsed.content.strip()))
        self._read = start
        self._held = dict.fromkeys(FIELDS, "")
        self._grow()

    def _grow(self) -> None:
        field = self._open
        if field is None or (field == CONTENT and self._stopped):
            self._read = len(self._ids)
            return
        text = self._held[field] + self._decode()
        if not self._sent[field]:
            text = text.lstrip()
        ready = self._settled(text) if field == CONTENT else text
        ready = ready.rstrip()
        self._held[field] = text[len(ready) :]
        self._send(field, ready)

    def _decode(self) -> str:
        """The text of the ids that were not read, without the beginning of a character."""
        for end in range(len(self._ids), max(self._read, len(self._ids) - CHARACTER_IDS), -1):
            text = self._codec.decode(self._ids[self._read : end])
            if not text.endswith(_BROKEN):
                self._read = end
                return text
        if len(self._ids) - self._read < CHARACTER_IDS:
            return ""
        text = self._codec.decode(self._ids[self._read :])
        self._read = len(self._ids)
        return text

    def _read_again(self) -> None:
        if len(self._ids) < self._due:
            return
        self._due = len(self._ids) + max(4, len(self._ids) // 16)
        parsed = self._codec.parse(self._ids, self._prompt, self._tools, final=False)
        self._advance(THINKING, _edge(parsed.reasoning or ""))
        self._advance(CONTENT, _edge(self._settled(parsed.content)))

    def _settled(self, content: str) -> str:
        """The part of the content that no stop text can begin in."""
        content, stop = cut_at_stop(content, self._stops)
        self._stopped = self._stopped or stop is not None
        return content if stop or not self._hold else content[: -self._hold]

    def _advance(self, field: str, text: str) -> None:
        sent = "".join(self._sent[field])
        if len(text) > len(sent) and text.startswith(sent):
            self._send(field, text[len(sent) :])

    def _send(self, field: str, text: str) -> None:
        if text:
            self._emit(field, text)
            self._sent[field].append(text)


def _edge(text: str) -> str:
    """Edges may still be trimmed, and half a character decodes to a replacement."""
    return text.strip().rstrip(_BROKEN).rstrip()
