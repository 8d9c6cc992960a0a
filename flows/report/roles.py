"""Who did what when: the roles of cells over time, out of the manager's journals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cells.decisions import ALL_CELLS, Decision
from cells.levels import LARGEST_GAP_S, Level
from cells.scheduler import Role

_CUT_S = 4 * LARGEST_GAP_S
"""A journal that is silent for longer than this belongs to a run that was not running."""
FAILED = "failed"


@dataclass(frozen=True)
class Span:
    """A cell in one role. Times are seconds since the epoch."""

    cell: str
    role: str
    """A role of the scheduler, or ``failed``."""
    start: float
    end: float
    why: str
    """Why the manager moved the cell to this role; empty where it did not."""


def role_spans(
    levels: Sequence[Level], decisions: Sequence[Decision], began: float, ended: float
) -> tuple[Span, ...]:
    """The roles of every cell from ``began`` to ``ended``.

    A decision is exact to the millisecond; levels say what there was before the first decision and
    when nothing ran. Runs of older versions of Gyre have no levels: their cells began in rollout
    and are taken to have run all the time.
    """
    points = _points(levels, decisions)
    if not levels:
        for cell in points:
            points[cell].append((began, Role.ROLLOUT, ""))
    spans: list[Span] = []
    for cell, own in sorted(points.items()):
        own.sort(key=lambda point: point[0])
        ends = [at for at, _, _ in own[1:]] + [ended]
        for (start, role, why), end in zip(own, ends, strict=True):
            if levels and end - start > _CUT_S:
                continue
            last = spans[-1] if spans else None
            joined = last is not None and (last.cell, last.role, last.end) == (cell, role, start)
            if last is not None and joined:
                spans[-1] = Span(cell, role, last.start, end, last.why or why)
            elif end > start:
                spans.append(Span(cell, role, start, end, why))
    return tuple(spans)


_Point = tuple[float, str, str]


def _points(
    levels: Sequence[Level], decisions: Sequence[Decision]
) -> defaultdict[str, list[_Point]]:
    """When which role was seen or entered, by cell."""
    points: defaultdict[str, list[_Point]] = defaultdict(list)
    for decision in decisions:
        if decision.cell == ALL_CELLS:
            continue
        own = points[decision.cell]
        if decision.failed:
            own.append((decision.at, FAILED, decision.failed))
            continue
        begun = decision.at - decision.seconds
        own.append((begun, Role.SWITCHING, decision.reason))
        own.append((decision.at, decision.to, decision.reason))
    cells = {name for level in levels for name in level.roles}
    for level in levels:
        for name in cells:
            role = level.roles.get(name)
            points[name].append((level.at, role or FAILED, ""))
    return points
