"""What the manager of the cells did, and why: rows of a journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from pydantic import Field

from cells.moves import Parts
from cells.scheduler import Move, Pacing, Role
from storage.journal import Journal, read_journal
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Record, decode, encode

ALL_CELLS = "(all)"
"""In the place of a cell, where the pace of launches was chosen."""


class Decision(Record):
    """One row: a move that has ended, a cell that was left out or taken back, or the pace of
    launches."""

    at: float
    step: int
    cell: str
    to: str
    reason: str
    waterlevel: int
    seconds: float
    failed: str
    """Empty, or what went wrong with the move."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Seconds by what the move consisted of."""


class DecisionLog:
    """Writes decisions of one step.

    Args:
        report: called with each of them.
    """

    def __init__(
        self, store: Store, layout: RunLayout, step: int, report: Callable[[Decision], None]
    ) -> None:
        self._journal = Journal(store, layout.decisions)
        self._step = step
        self._report = report

    def write(
        self,
        move: Move,
        seconds: float = 0.0,
        failed: str = "",
        waterlevel: int = 0,
        parts: Parts | None = None,
    ) -> None:
        """
        Raises:
            StorageError: the store is full or refuses.
        """
        self._write(
            Decision(
                at=time.time(),
                step=self._step,
                cell=move.cell_id,
                to=str(move.to),
                reason=move.reason,
                waterlevel=waterlevel,
                seconds=round(seconds, 3),
                failed=failed,
                parts=parts or {},
            )
        )

    def chose(self, pacing: Pacing, waterlevel: int) -> None:
        """The pace of launches is another from now on, or that of a step that begins.

        Raises:
            StorageError: the store is full or refuses.
        """
        self._write(
            Decision(
                at=time.time(),
                step=self._step,
                cell=ALL_CELLS,
                to=str(pacing.pace),
                reason=pacing.reason,
                waterlevel=waterlevel,
                seconds=0.0,
                failed="",
            )
        )

    def _write(self, decision: Decision) -> None:
        self._journal.append([encode(decision)])
        self._report(decision)

    def close(self) -> None:
        self._journal.close()


def earlier_moves(store: Store, layout: RunLayout) -> Iterator[tuple[Role, float]]:
    """Role and seconds of the moves that were carried out in the run so far, oldest first."""
    for row in read_journal(store, layout.decisions):
        decision = decode(row, Decision, where=layout.decisions)
        if not decision.failed and decision.to in (Role.TRAINING, Role.ROLLOUT):
            yield Role(decision.to), decision.seconds
