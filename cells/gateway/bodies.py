"""Request bodies of which only the new end is parsed."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from hashlib import _Hash

KEPT = 4
"""Bodies that are remembered: of the agents that take turns."""
_EDGE = 64
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_OPEN, _CLOSE, _TEXT = b"[{", b"]}", b'"'
_STAND_IN = secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Known:
    """The beginning of a body that was parsed: up to behind the newest item of its history.

    Args:
        start: offset of the first item of the list ``name``.
        end: offset behind the last one of ``items``.
        edge: the last bytes before ``end``.
        digest: of all bytes before ``end``.
    """

    name: str
    start: int
    end: int
    edge: bytes
    digest: bytes
    items: list[Any]


class Bodies:
    """Parses bodies whose histories grow: where a body begins, byte for byte, as one did before,
    the items of its history up to there are those of before, the very same objects.

    The bytes are compared by a cryptographic digest, so that no history is kept twice, at a
    gigabyte a second. What is left of the body is parsed with one text in place of the known items:
    the same grammar, so whatever is wrong with it is found. Where the text does not come back at
    its place in the list (there is a second list of that name, or it is not the body's own), and
    where anything else is not as expected, the whole is parsed.
    """

    def __init__(self) -> None:
        self._known: list[Known] = []

    def parse(self, body: bytes, name: str) -> Any:
        """The JSON value of a body, whose history is the list ``name``.

        Raises:
            orjson.JSONDecodeError: it is no JSON.
        """
        for known in self._known:
            seen = _digest_if_known(body, name, known)
            data = None if seen is None else _parse_rest(body, known)
            if seen is not None and data is not None:
                new = data[name]
                new[:1] = known.items
                self._known.remove(known)
                count = len(known.items)
                self._remember(body, name, new, known.start, known.end, count, seen)
                return data
        data = orjson.loads(body)
        items = data.get(name) if isinstance(data, dict) else None
        found = re.search(rb'"%s"\s*:\s*\[' % name.encode(), body)
        if items and isinstance(items, list) and found:
            self._remember(body, name, items, found.end(), found.end(), 0, sha256())
        return data

    def _remember(
        self,
        body: bytes,
        name: str,
        items: list[Any],
        start: int,
        at: int,
        count: int,
        seen: _Hash,
    ) -> None:
        """Keep where a list ends, of which ``count`` items end before ``at``.

        Args:
            seen: the digest of what is before ``at``, or of nothing.
        """
        end = _end_of_items(body, at, len(items) - count)
        if end is None:
            return
        seen.update(memoryview(body)[at if count else 0 : end])
        edge = body[end - _EDGE : end]
        known = Known(name, start, end, edge, seen.digest(), items)
        self._known = [known, *self._known[: KEPT - 1]]


def _digest_if_known(body: bytes, name: str, known: Known) -> _Hash | None:
    """The digest of what is known, where the body begins with it."""
    end = known.end
    if known.name != name or len(body) <= end or not body.endswith(known.edge, 0, end):
        return None
    seen = sha256(memoryview(body)[:end])
    return seen if seen.digest() == known.digest else None


def _parse_rest(body: bytes, known: Known) -> dict[str, Any] | None:
    """The body with the stand-in for its known items; None in any doubt."""
    stand_in = _TEXT + _STAND_IN.encode() + _TEXT
    try:
        data = orjson.loads(b"".join((body[: known.start], stand_in, body[known.end :])))
    except orjson.JSONDecodeError:
        return None
    items = data.get(known.name) if isinstance(data, dict) else None
    ours = isinstance(items, list) and items and items[0] == _STAND_IN
    return data if ours else None


def _end_of_items(body: bytes, at: int, count: int) -> int | None:
    """Where the next ``count`` items of a list end in a body that is JSON, from behind the item
    before; None where they are not exactly the rest of the list, as far as texts, lists and objects
    tell."""
    depth, end = 0, at
    for token in _TOKEN.finditer(body, at):
        first = body[token.start()]
        if first in _CLOSE:
            depth -= 1
        elif first in _OPEN:
            depth += 1
        if depth < 0:
            return end if count == 0 else None
        if depth == 0:
            count -= 1
            end = token.end()
    return None
