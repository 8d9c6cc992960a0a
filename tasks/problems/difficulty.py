"""How hard the problems of a run were, from its verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from storage.records import Scored, VerdictRecord


@dataclass(frozen=True)
class Difficulty:
    """What the executions of one problem came to."""

    problem_id: str
    executions: int
    excluded: int
    timed_out: int
    solved: int
    """With the whole reward."""
    pass_rate: float | None
    """Mean reward of those that have one; None without any."""


def difficulty(
    verdicts: Iterable[tuple[str, VerdictRecord | None]],
) -> list[Difficulty]:
    """One row a problem, the hardest first; those without any reward last.

    Args:
        verdicts: problem and newest verdict of each execution.
    """
    found: dict[str, list[VerdictRecord | None]] = {}
    for problem, record in verdicts:
        found.setdefault(problem, []).append(record)
    rows = [_row(problem, records) for problem, records in found.items()]
    return sorted(
        rows, key=lambda row: (row.pass_rate is None, row.pass_rate or 0.0, row.problem_id)
    )


def _row(problem: str, records: list[VerdictRecord | None]) -> Difficulty:
    scored = [one.verdict for one in records if one and isinstance(one.verdict, Scored)]
    rewards = [verdict.reward for verdict in scored]
    return Difficulty(
        problem_id=problem,
        executions=len(records),
        excluded=len(records) - len(scored),
        timed_out=sum(verdict.timed_out for verdict in scored),
        solved=sum(reward >= 1 for reward in rewards),
        pass_rate=fmean(rewards) if rewards else None,
    )
