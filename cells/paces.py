"""The paces that an adaptive policy chose in a run: rows of a journal, from which it goes on."""

from __future__ import annotations

from cells.scheduler import Choice, GroupSeen, Pace, Pacing, Spell
from storage.records import Record


class PaceRow(Record):
    """One choice, and how far the run was.

    Args:
        at: seconds since the epoch.
        worked_s: seconds that the run had worked, without what lay between its steps.
        ended: groups whose executions had all ended since the row before.
        bursts: what was measured of bursts, by which it was chosen.
    """

    at: float
    worked_s: float
    step: int
    updates: int
    busy_s: float
    pace: Pace
    window: int
    serving_cells: int
    may_wait: float
    reason: str
    ended: tuple[GroupSeen, ...] = ()
    bursts: Spell | None = None

    @classmethod
    def of(cls, choice: Choice, *, at: float, step: int, ended: tuple[GroupSeen, ...]) -> PaceRow:
        """The row of a choice."""
        pacing = choice.pacing
        return cls(
            at=at,
            worked_s=choice.time,
            step=step,
            updates=choice.updates,
            busy_s=choice.busy_s,
            pace=pacing.pace,
            window=pacing.window,
            serving_cells=pacing.serving_cells,
            may_wait=pacing.may_wait,
            reason=pacing.reason,
            ended=ended,
            bursts=choice.bursts,
        )

    def choice(self, groups: int) -> Choice:
        """As it was made, when ``groups`` had ended."""
        pacing = Pacing(self.pace, self.window, self.serving_cells, self.reason, self.may_wait)
        return Choice(pacing, self.worked_s, self.updates, self.busy_s, groups, self.bursts)
