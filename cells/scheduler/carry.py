"""Roles while groups are carried over: no cell is idle while another kind of work waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from cells.scheduler.snapshot import CellView, Move, Role, Snapshot

_FEW = 2
"""Sealed micro-steps a trainer: with fewer the training will soon wait, and queued executions get
a further cell."""
_MANY = 4
"""With so many a cell leaves although executions are queued."""


@dataclass(frozen=True, slots=True)
class Carry:
    """Serving cells are kept full, all others train; queued executions wait for a place.

    With a window of launched groups waiting costs nothing: an execution that has not begun has no
    tokens that could become stale. So a cell leaves rollout as soon as those that stay have places
    for the executions that hold one, and sealed micro-steps wait for it. It comes back for queued
    executions when fewer serve than `Snapshot.serving_cells`, or when few micro-steps are left for
    the trainers, one cell at a time. One cell serves while anything lives. `min_gain` and
    `dwell_s` are those of `Elastic`.
    """

    min_gain: float = 1.0
    dwell_s: float = 0.0

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """See `Policy.decide`."""
        if snapshot.training.expected == 0:
            return tuple(
                Move(cell.cell_id, Role.ROLLOUT, "nothing is left to train")
                for cell in _in_role(snapshot, Role.TRAINING)
            )
        return self._back(snapshot) or self._to_training(snapshot)

    def _back(self, snapshot: Snapshot) -> tuple[Move, ...]:
        serving = snapshot.heading(Role.ROLLOUT)
        trainers = sorted(_in_role(snapshot, Role.TRAINING), key=lambda c: (c.is_core, c.cell_id))
        if not snapshot.queued or not trainers:
            return ()
        if not serving:
            return (Move(trainers[0].cell_id, Role.ROLLOUT, _queue_reason(snapshot)),)
        work = snapshot.training
        room = sum(max(cell.capacity - cell.live, 0) for cell in serving)
        idle = len(trainers) - work.claimed if work.sealed == 0 else 0
        if work.sealed < _FEW * len(trainers):
            idle = max(idle, 1)
        missing = max(idle, snapshot.serving_cells - len(serving))
        if work.sealed and any(cell.role is Role.SWITCHING for cell in snapshot.cells):
            missing = 0  # what the last move does is not seen yet
        wanted = min(missing, ceil((snapshot.queued - room) / trainers[0].capacity))
        return tuple(
            Move(cell.cell_id, Role.ROLLOUT, _queue_reason(snapshot))
            for cell in trainers[: max(wanted, 0)]
            if not cell.is_core and self._settled(cell, snapshot)
        )

    def _to_training(self, snapshot: Snapshot) -> tuple[Move, ...]:
        staying = list(snapshot.serving())
        trainers = len(snapshot.heading(Role.TRAINING))
        moves: list[Move] = []
        for cell in sorted(staying, key=lambda c: (not c.is_core, c.live, c.cell_id)):
            others = [other for other in staying if other is not cell]
            if not (_places(others) >= snapshot.running and self._settled(cell, snapshot)):
                continue
            if len(others) < self._needed(snapshot):
                continue
            if not self._worth_it(cell, trainers, snapshot):
                continue
            staying = others
            trainers += 1
            reason = (
                f"{len(others)} cells have places for {snapshot.running} running executions, "
                f"{snapshot.training.sealed} micro-steps wait"
            )
            moves.append(Move(cell.cell_id, Role.TRAINING, reason))
        return tuple(moves)

    def _needed(self, snapshot: Snapshot) -> int:
        """Cells that have to serve, however few executions hold a place."""
        return snapshot.serving_cells if snapshot.queued else min(snapshot.waterlevel, 1)

    def _settled(self, cell: CellView, snapshot: Snapshot) -> bool:
        return snapshot.time - cell.since >= self.dwell_s

    def _worth_it(self, cell: CellView, trainers: int, snapshot: Snapshot) -> bool:
        """Whether what waits for a trainer pays for a switch there and back."""
        work, timings = snapshot.training, snapshot.timings
        if cell.is_core or trainers == 0:
            return work.sealed > 0
        if snapshot.queued and work.sealed < _MANY * trainers:
            return False
        seconds = work.sealed * timings.micro_step_s
        saved = seconds / trainers - seconds / (trainers + 1)
        cost = timings.to_training_s + timings.pull_s + timings.to_rollout_s
        return work.sealed > trainers and saved >= self.min_gain * cost


def _in_role(snapshot: Snapshot, role: Role) -> tuple[CellView, ...]:
    return tuple(cell for cell in snapshot.cells if cell.role is role)


def _places(cells: Sequence[CellView]) -> int:
    return sum(cell.capacity for cell in cells)


def _queue_reason(snapshot: Snapshot) -> str:
    return f"{snapshot.queued} executions are queued, {snapshot.training.sealed} micro-steps wait"
