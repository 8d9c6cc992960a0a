"""Calls of one execution as a tree of token segments; every shared prefix is stored once.

The tree follows what was really sent and sampled:

- A call's prompt is the first ``kept`` ids of its parent's prompt and output, then its new ids. A
  smaller ``kept`` forks the tree where the history was edited; the parent's output stays whole in
  its own branch.
- Context is shared with equal context (a retry, two agents with one system prompt). Sampled tokens
  are never merged with anything: two answers with equal ids are two samples, and a copy of an
  answer that came back as new ids is context.

Building takes time linear in the new tokens of the calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from storage.records import Call

ROOT = -1
Ids = npt.NDArray[np.int32]
N = TypeVar("N", bound=np.generic)


class CallTreeError(ValueError):
    """Recorded calls that contradict each other; the text names the call."""


@dataclass(frozen=True)
class Segment:
    """Tokens that every path through them has in common. ``ids`` [tokens]."""

    parent: int
    """Segment before it, or ``ROOT``."""
    start: int
    """Tokens before it on every path that holds it."""
    ids: Ids
    call: int | None
    """Number of the call that sampled these tokens; None for context."""
    offset: int
    """Position of its first token in that call's output; 0 for context."""


@dataclass(frozen=True)
class PlacedCall:
    """A call and its place in the tree. ``logprobs`` and ``versions`` are [output tokens]."""

    call: Call
    prompt_tokens: int
    end: int
    """Segment with which its output ends; its prompt, when it has no output."""
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + len(self.logprobs)


@dataclass(frozen=True)
class CallTree:
    """Segments with parents before children, and the calls in order of arrival."""

    segments: tuple[Segment, ...]
    calls: tuple[PlacedCall, ...]

    def chain(self, segment: int) -> list[int]:
        """Segments from a root through ``segment``."""
        found: list[int] = []
        while segment != ROOT:
            found.append(segment)
            segment = self.segments[segment].parent
        found.reverse()
        return found

    def ids(self, segment: int) -> Ids:
        """All tokens from the root through the end of ``segment``."""
        parts = [self.segments[index].ids for index in self.chain(segment)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def build_tree(calls: Iterable[Call]) -> CallTree:
    """The tree of one execution's calls, in whatever order they come.

    Raises:
        CallTreeError: a parent is missing or comes round in a circle, more is kept than the parent
            has, an output lacks log-probabilities or versions, or a prompt is empty.
    """
    builder = _Builder(_distinct(calls))
    builder.place_all()
    return builder.tree()


@dataclass(frozen=True)
class _Piece:
    """A segment before it is cut where others branch off."""

    parent: int
    at: int
    """Tokens of the parent piece that come before this one."""
    start: int
    ids: Ids
    call: int | None


@dataclass(frozen=True)
class _Place:
    """After the first ``at`` tokens of a piece."""

    piece: int
    at: int


class _Builder:
    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._numbers = {call.call_id: number for number, call in enumerate(calls)}
        self._pieces: list[_Piece] = []
        self._context: dict[tuple[int, int, int], int] = {}
        """Piece, place and first id to the context that follows there."""
        self._prompts: dict[int, int] = {}
        self._ends: dict[int, _Place] = {}

    def place_all(self) -> None:
        for first in range(len(self._calls)):
            waiting = [first]
            while waiting:
                number = waiting[-1]
                parent = self._parent(number)
                if number in self._ends:
                    waiting.pop()
                elif parent is None or parent in self._ends:
                    self._place(number, parent)
                    waiting.pop()
                elif parent in waiting:
                    raise CallTreeError(f"{self._calls[number].call_id}: is its own ancestor")
                else:
                    waiting.append(parent)

    def tree(self) -> CallTree:
        """Cut the pieces where others branch off or calls end."""
        cuts: list[set[int]] = [{len(piece.ids)} for piece in self._pieces]
        for piece in self._pieces:
            if piece.parent != ROOT:
                cuts[piece.parent].add(piece.at)
        for place in self._ends.values():
            cuts[place.piece].add(place.at)
        segments: list[Segment] = []
        ending: dict[_Place, int] = {}
        for number, piece in enumerate(self._pieces):
            above = ROOT if piece.parent == ROOT else ending[_Place(piece.parent, piece.at)]
            begin = 0
            for end in sorted(cuts[number]):
                segments.append(
                    Segment(
                        parent=above,
                        start=piece.start + begin,
                        ids=piece.ids[begin:end],
                        call=piece.call,
                        offset=0 if piece.call is None else begin,
                    )
                )
                above = len(segments) - 1
                ending[_Place(number, end)] = above
                begin = end
        placed = tuple(
            PlacedCall(
                call=call,
                prompt_tokens=self._prompts[number],
                end=ending[self._ends[number]],
                logprobs=_frozen(np.asarray(call.output_logprobs, np.float32)),
                versions=_versions(call),
            )
            for number, call in enumerate(self._calls)
        )
        return CallTree(tuple(segments), placed)

    def _parent(self, number: int) -> int | None:
        call = self._calls[number]
        if call.parent is None:
            return None
        if call.parent not in self._numbers:
            raise CallTreeError(f"{call.call_id}: its parent {call.parent} is not recorded")
        return self._numbers[call.parent]

    def _place(self, number: int, parent: int | None) -> None:
        call = self._calls[number]
        length = 0 if parent is None else self._length(self._ends[parent])
        if not 0 <= call.kept <= length:
            raise CallTreeError(f"{call.call_id}: keeps {call.kept} of {length} tokens")
        if len(call.output_logprobs) != len(call.output_ids):
            raise CallTreeError(
                f"{call.call_id}: {len(call.output_logprobs)} log-probabilities for "
                f"{len(call.output_ids)} output tokens"
            )
        place = _Place(ROOT, 0) if parent is None else self._kept(self._ends[parent], call.kept)
        place = self._follow(place, _ids(call, call.new_ids))
        self._prompts[number] = self._length(place)
        if place.piece == ROOT:
            raise CallTreeError(f"{call.call_id}: its prompt is empty")
        if call.output_ids:
            place = self._add(place, _ids(call, call.output_ids), number)
        self._ends[number] = place

    def _kept(self, end: _Place, kept: int) -> _Place:
        """The place ``kept`` tokens from the root, on the way to ``end``."""
        piece = end.piece
        while piece != ROOT and kept <= self._pieces[piece].start:
            piece = self._pieces[piece].parent
        return _Place(piece, 0 if piece == ROOT else kept - self._pieces[piece].start)

    def _follow(self, place: _Place, ids: Ids) -> _Place:
        """Go along context that is there already, and add what is new."""
        done = 0
        while done < len(ids):
            if place.piece != ROOT and self._pieces[place.piece].call is None:
                same = _common(self._pieces[place.piece].ids[place.at :], ids[done:])
                if same:
                    place = _Place(place.piece, place.at + same)
                    done += same
                    continue
            child = self._context.get((place.piece, place.at, int(ids[done])))
            if child is None:
                return self._add(place, ids[done:], None)
            place = _Place(child, 0)
        return place

    def _add(self, place: _Place, ids: Ids, call: int | None) -> _Place:
        number = len(self._pieces)
        self._pieces.append(_Piece(place.piece, place.at, self._length(place), ids, call))
        if call is None:
            self._context[place.piece, place.at, int(ids[0])] = number
        return _Place(number, len(ids))

    def _length(self, place: _Place) -> int:
        return 0 if place.piece == ROOT else self._pieces[place.piece].start + place.at


def _distinct(calls: Iterable[Call]) -> list[Call]:
    """Calls by arrival; one that was written twice counts once."""
    found: dict[str, Call] = {}
    for call in calls:
        if found.setdefault(call.call_id, call) != call:
            raise CallTreeError(f"{call.call_id}: recorded twice with different content")
    return sorted(found.values(), key=lambda call: (call.index, call.call_id))


def _ids(call: Call, ids: tuple[int, ...]) -> Ids:
    try:
        return _frozen(np.asarray(ids, np.int32))
    except OverflowError:
        raise CallTreeError(f"{call.call_id}: a token id is larger than 32 bits") from None


def _versions(call: Call) -> npt.NDArray[np.int32]:
    versions = np.empty(len(call.output_ids), np.int32)
    done = 0
    for span in sorted(call.spans, key=lambda span: (span.start, span.end)):
        if span.start != done or not done <= span.end <= len(versions):
            break
        versions[span.start : span.end] = span.version
        done = span.end
    if done != len(versions):
        raise CallTreeError(
            f"{call.call_id}: version spans cover {done} of {len(versions)} output tokens"
        )
    return _frozen(versions)


def _common(left: Ids, right: Ids) -> int:
    """Length of the common prefix, in time linear in it."""
    limit = min(len(left), len(right))
    done, width = 0, 64
    while done < limit:
        end = min(done + width, limit)
        differs = left[done:end] != right[done:end]
        if differs.any():
            return done + int(differs.argmax())
        done, width = end, width * 2
    return limit


def _frozen(array: npt.NDArray[N]) -> npt.NDArray[N]:
    array.flags.writeable = False
    return array
