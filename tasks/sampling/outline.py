"""A call tree as lines in reading order, with what became of every token, for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from configs.training import TrajectoryConfig
from storage.records import CallKind, CallStatus
from tasks.sampling.selection import Selection, longest
from tasks.sampling.tree import ROOT, CallTree, Ids, PlacedCall


class Role(StrEnum):
    """What the tokens of a segment are to the training."""

    CONTEXT = "context"
    TARGET = "target"
    DROPPED = "dropped"
    """Only on trajectories beyond the cap."""
    CUT = "too long"
    """Their call ends beyond the longest trajectory."""
    ABANDONED = "abandoned"
    BACKGROUND = "background"


@dataclass(frozen=True)
class Line:
    """One segment. The first line of a branch is one level above the lines that follow it."""

    depth: int
    start: int
    """Tokens before it on its path."""
    ids: Ids
    placed: PlacedCall | None
    """The call that sampled it; None for context."""
    role: Role
    trajectory: int | None
    """Number in the selection of the trajectory whose targets these are."""
    versions: tuple[int, ...]
    """Weight versions that sampled its tokens."""
    mean_logprob: float | None


def outline(
    tree: CallTree, selection: Selection, config: TrajectoryConfig, context: int
) -> tuple[Line, ...]:
    """Every segment, a branch whole before the next one.

    Args:
        config, context: that the selection was made with.
    """
    owners = {
        segment: number
        for number, trajectory in enumerate(selection.trajectories)
        for segment in trajectory.targets
    }
    children: dict[int, list[int]] = {}
    for number, segment in enumerate(tree.segments):
        children.setdefault(segment.parent, []).append(number)
    most = longest(config, context)
    lines: list[Line] = []
    waiting = [(number, 0, True) for number in reversed(children.get(ROOT, []))]
    while waiting:
        number, depth, head = waiting.pop()
        lines.append(_line(tree, number, depth, owners.get(number), most))
        below = children.get(number, [])
        level = depth + head
        waiting += [(child, level, len(below) > 1) for child in reversed(below)]
    return tuple(lines)


def _line(tree: CallTree, number: int, depth: int, owner: int | None, most: int) -> Line:
    segment = tree.segments[number]
    placed = None if segment.call is None else tree.calls[segment.call]
    versions: tuple[int, ...] = ()
    mean = None
    if placed is not None:
        here = slice(segment.offset, segment.offset + len(segment.ids))
        versions = tuple(sorted(set(placed.versions[here].tolist())))
        mean = float(placed.logprobs[here].mean())
    return Line(
        depth=depth,
        start=segment.start,
        ids=segment.ids,
        placed=placed,
        role=_role(placed, owner, most),
        trajectory=owner,
        versions=versions,
        mean_logprob=mean,
    )


def _role(placed: PlacedCall | None, owner: int | None, most: int) -> Role:
    if placed is None:
        return Role.CONTEXT
    if owner is not None:
        return Role.TARGET
    if placed.call.status is CallStatus.ABANDONED:
        return Role.ABANDONED
    if placed.call.kind is CallKind.BACKGROUND:
        return Role.BACKGROUND
    return Role.CUT if placed.tokens > most else Role.DROPPED
