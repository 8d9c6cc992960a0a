"""Roles while groups are carried over: a cell serves while it is well filled, else it trains."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cells.scheduler.snapshot import CellView, Move, Role, Snapshot

_HYSTERESIS = 0.5
"""Share of a cell's places by which more has work when it comes back than when it left."""


@dataclass(frozen=True, slots=True)
class Carry:
    """As many cells serve as live executions fill; the few that are left over wait in between.

    The last executions of a burst hold a cell that they hardly use, which is where most of the time
    of bursts is lost. Where groups are carried over, new ones come with every update, so that those
    few can wait for them: their calls are held back, their tools go on, and one cell after another
    trains. Three things bound the waiting. When the oldest token of a group that runs is `patience`
    updates old, a cell serves whatever lives; so it does when a call has waited for too long, and
    when nothing more will be launched.

    A cell also serves where the training would soon wait for groups. `min_gain` and `dwell_s` are
    those of `Elastic`.
    """

    min_gain: float = 1.0
    dwell_s: float = 0.0
    patience: int = 6

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """See `Policy.decide`. The last cell that serves may leave while executions live."""
        if snapshot.training.expected == 0:
            return tuple(
                Move(cell.cell_id, Role.ROLLOUT, "nothing is left to train")
                for cell in _in_role(snapshot, Role.TRAINING)
            )
        return self._back(snapshot) or self._to_training(snapshot)

    def _back(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """Satellites; the core stays, for only it can end an update."""
        trainers = _in_role(snapshot, Role.TRAINING)
        missing = self._called(snapshot, len(trainers)) - len(snapshot.heading(Role.ROLLOUT))
        able = [cell for cell in trainers if not cell.is_core and self._settled(cell, snapshot)]
        return tuple(
            Move(cell.cell_id, Role.ROLLOUT, _live_reason(snapshot))
            for cell in able[: max(missing, 0)]
        )

    def _to_training(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """The core and then the emptiest, down to as many cells as are filled."""
        spare = len(snapshot.heading(Role.ROLLOUT)) - self._kept(snapshot)
        trainers = len(snapshot.heading(Role.TRAINING))
        moves: list[Move] = []
        serving = sorted(snapshot.serving(), key=lambda c: (not c.is_core, c.live, c.cell_id))
        for cell in serving:
            if len(moves) >= spare and not cell.is_core:
                break
            if self._settled(cell, snapshot) and self._worth_it(cell, trainers, snapshot):
                moves.append(Move(cell.cell_id, Role.TRAINING, _live_reason(snapshot)))
                trainers += 1
        return tuple(moves)

    def _called(self, snapshot: Snapshot, trainers: int) -> int:
        """Cells that shall serve at least: for what fills them, and for training that is dry."""
        work = snapshot.training
        filled = self._filled(snapshot, snapshot.may_wait + _HYSTERESIS)
        called = min(filled, snapshot.serving_cells)
        if not snapshot.waterlevel or work.sealed:
            return called
        serving = len(snapshot.heading(Role.ROLLOUT))
        idle = max(trainers - work.claimed, 1)
        return max(called, min(serving + idle, ceil(_full(snapshot))))

    def _kept(self, snapshot: Snapshot) -> int:
        """Cells that go on serving once they do."""
        return self._filled(snapshot, snapshot.may_wait)

    def _filled(self, snapshot: Snapshot, share: float) -> int:
        """Cells for which that share of their places has work, or one for what may not wait."""
        if snapshot.last:
            return ceil(_full(snapshot))
        cells = int(_full(snapshot) + 1 - share)
        urgent = snapshot.oldest >= self.patience or snapshot.overdue
        return max(cells, 1) if urgent and snapshot.waterlevel else cells

    def _settled(self, cell: CellView, snapshot: Snapshot) -> bool:
        return snapshot.time - cell.since >= self.dwell_s

    def _worth_it(self, cell: CellView, trainers: int, snapshot: Snapshot) -> bool:
        """Whether what waits for a trainer pays for a switch there and back."""
        work, timings = snapshot.training, snapshot.timings
        if cell.is_core:
            return work.sealed + work.claimed > 0
        if trainers == 0:
            return False
        seconds = work.sealed * timings.micro_step_s
        saved = seconds / trainers - seconds / (trainers + 1)
        cost = timings.to_training_s + timings.pull_s + timings.to_rollout_s
        return work.sealed > trainers and saved >= self.min_gain * cost


def _in_role(snapshot: Snapshot, role: Role) -> tuple[CellView, ...]:
    return tuple(cell for cell in snapshot.cells if cell.role is role)


def _full(snapshot: Snapshot) -> float:
    """How many cells the live executions would fill."""
    return (snapshot.waterlevel + snapshot.coming) / snapshot.cells[0].capacity


def _live_reason(snapshot: Snapshot) -> str:
    return (
        f"{snapshot.waterlevel} live executions fill {_full(snapshot):.1f} cells, "
        f"{snapshot.training.sealed} micro-steps wait, the oldest token is {snapshot.oldest} "
        f"updates old"
    )
