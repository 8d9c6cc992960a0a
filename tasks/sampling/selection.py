"""Which root-to-leaf paths of a call tree are trained, and which tokens are targets where.

A path ends with a call that no other trained call extends; it is of that call's kind, and what
came before is its context. A summary call that extends the main history therefore makes a
main-summary path that holds the turns before the compaction; the fresh history after it is another
root and a main path of its own. Where a summary and a later turn extend the same history, the
shared turns lie on two paths and are targets in the main one.

Paths are taken in the order main, main-summary, sub-agent, sub-agent-summary, up to the cap. Inside
a kind ``most_targets`` takes the path that adds most targets to what is taken already, ``latest``
the one whose last call arrived last; the later call wins a tie. A token is a target in the first
path taken that holds it, and in no other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from configs.training import TrajectoryConfig, WithinKind
from storage.records import CallKind, CallStatus
from tasks.sampling.tree import ROOT, CallTree, PlacedCall

RANK = (
    CallKind.MAIN,
    CallKind.MAIN_SUMMARY,
    CallKind.SUB_AGENT,
    CallKind.SUB_AGENT_SUMMARY,
)


@dataclass(frozen=True)
class Trajectory:
    """A selected path and its own targets."""

    tip: int
    """Number of the call that it ends with."""
    kind: CallKind
    targets: tuple[int, ...]
    """Segments whose tokens are targets here, in order."""
    target_tokens: int


@dataclass(frozen=True)
class Selection:
    """What is trained of an execution, highest rank first, and what is not."""

    trajectories: tuple[Trajectory, ...]
    paths: int
    """Paths with targets before the cap."""
    kept: Mapping[CallKind, int]
    """Trajectories by kind, without kinds that have none."""
    dropped: Mapping[CallKind, int]
    """Paths that the cap drops, by kind, without kinds that lose none."""
    target_tokens: int
    dropped_tokens: int
    """Targets that only dropped paths hold."""
    cut_tokens: int
    """Output of calls that end beyond the longest trajectory: their paths are cut before them."""


def select(tree: CallTree, config: TrajectoryConfig, context: int) -> Selection:
    """The trajectories of an execution.

    Outputs of background and abandoned calls, and of calls that end beyond ``context`` or
    ``config.max_tokens`` tokens, are never targets.
    """
    most = longest(config, context)
    fits = [placed.tokens <= most for placed in tree.calls]
    trained = [_trainable(placed) and fit for placed, fit in zip(tree.calls, fits, strict=True)]
    picker = _Picker(tree, trained)
    paths = picker.paths()
    room = len(tree.calls) if config.cap is None else config.cap
    taken: list[Trajectory] = []
    kept: dict[CallKind, int] = {}
    for kind in RANK:
        tips = paths.get(kind, [])
        order = picker.most_targets(tips) if _most(config) else picker.latest(tips)
        before = len(taken)
        while len(taken) < room and len(taken) - before < len(tips):
            taken.append(picker.take(next(order)))
        kept[kind] = len(taken) - before
    total = sum(_output(placed) for placed, use in zip(tree.calls, trained, strict=True) if use)
    targets = sum(trajectory.target_tokens for trajectory in taken)
    cut = [
        _output(placed)
        for placed, fit in zip(tree.calls, fits, strict=True)
        if _trainable(placed) and not fit
    ]
    return Selection(
        trajectories=tuple(taken),
        paths=sum(len(tips) for tips in paths.values()),
        kept={kind: count for kind, count in kept.items() if count},
        dropped={
            kind: len(tips) - kept[kind]
            for kind in RANK
            if (tips := paths.get(kind, [])) and len(tips) > kept[kind]
        },
        target_tokens=targets,
        dropped_tokens=total - targets,
        cut_tokens=sum(cut),
    )


def longest(config: TrajectoryConfig, context: int) -> int:
    """Most tokens of a trajectory."""
    return context if config.max_tokens is None else min(context, config.max_tokens)


class _Picker:
    """Gains of paths, given those that are taken."""

    def __init__(self, tree: CallTree, trained: list[bool]) -> None:
        self._tree = tree
        self._trained = trained
        self._taken = [False] * len(tree.segments)
        self._targets_to: list[int] = []
        """Targets from the root through each segment."""
        for segment in tree.segments:
            above = 0 if segment.parent == ROOT else self._targets_to[segment.parent]
            own = segment.call is not None and trained[segment.call]
            self._targets_to.append(above + (len(segment.ids) if own else 0))

    def paths(self) -> dict[CallKind, list[int]]:
        """Last calls of the paths with targets, by kind, in order of arrival."""
        segments = self._tree.segments
        extended = [False] * len(segments)
        for number in range(len(segments) - 1, -1, -1):
            call, parent = segments[number].call, segments[number].parent
            if parent != ROOT and (extended[number] or (call is not None and self._trained[call])):
                extended[parent] = True
        found: dict[CallKind, list[int]] = {}
        for number, placed in enumerate(self._tree.calls):
            if self._trained[number] and not extended[placed.end]:
                found.setdefault(placed.call.kind, []).append(number)
        return found

    def latest(self, tips: list[int]) -> Iterator[int]:
        return iter(sorted(tips, reverse=True))

    def most_targets(self, tips: list[int]) -> Iterator[int]:
        """Tips by what each adds. What is taken meanwhile only lowers a gain, so a tip whose gain
        is still the one it was queued with is the best."""
        queue = [(-self._gain(tip), -tip) for tip in tips]
        heapq.heapify(queue)
        while queue:
            gain, tip = queue[0]
            now = -self._gain(-tip)
            if now == gain:
                heapq.heappop(queue)
                yield -tip
            else:
                heapq.heapreplace(queue, (now, tip))

    def take(self, tip: int) -> Trajectory:
        """Make everything on a path that nobody has taken its own."""
        placed = self._tree.calls[tip]
        own: list[int] = []
        number = placed.end
        while number != ROOT and not self._taken[number]:
            self._taken[number] = True
            segment = self._tree.segments[number]
            if segment.call is not None and self._trained[segment.call]:
                own.append(number)
            number = segment.parent
        own.reverse()
        count = sum(len(self._tree.segments[number].ids) for number in own)
        return Trajectory(tip, placed.call.kind, tuple(own), count)

    def _gain(self, tip: int) -> int:
        end = number = self._tree.calls[tip].end
        while number != ROOT and not self._taken[number]:
            number = self._tree.segments[number].parent
        return self._targets_to[end] - (0 if number == ROOT else self._targets_to[number])


def _trainable(placed: PlacedCall) -> bool:
    call = placed.call
    return call.status is CallStatus.COMPLETE and call.kind in RANK and bool(call.output_ids)


def _output(placed: PlacedCall) -> int:
    return len(placed.call.output_ids)


def _most(config: TrajectoryConfig) -> bool:
    return config.within_kind is WithinKind.MOST_TARGETS
