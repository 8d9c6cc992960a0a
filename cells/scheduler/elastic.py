"""The published rule: cells follow the waterlevel, one after another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cells.scheduler.policy import Pipeline, PolicyError
from cells.scheduler.snapshot import CellView, Move, Role, Snapshot


@dataclass(frozen=True, slots=True)
class Elastic:
    """A cell goes to training once the cells that stay can still serve all live work.

    The core goes first, satellites after, the emptiest first. They come back when nothing is left
    to train or when queued work finds no room. While anything lives, one cell serves.

    `min_gain` is how many seconds of training a satellite must save for each second that its
    switches and its weight pull cost. `dwell_s` is the hysteresis: how long a cell keeps a role
    before it may leave it of its own accord. `headroom` is the share of the live work for which
    the cells that stay must have room beyond it.
    """

    min_gain: float = 1.0
    dwell_s: float = 0.0
    headroom: float = 0.0

    @property
    def name(self) -> str:
        """See `Policy.name`."""
        return "elastic"

    @property
    def pipeline(self) -> Pipeline:
        """Its own batch, trained while the rest of it still runs."""
        return Pipeline(lag=0, streaming=True)

    def __post_init__(self) -> None:
        """Refuse settings below zero."""
        if min(self.min_gain, self.dwell_s, self.headroom) < 0:
            raise PolicyError("min_gain, dwell_s and headroom cannot be negative")

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """See `Policy.decide`."""
        if snapshot.training.expected == 0:
            return _all_back(snapshot)
        back = self._back_for_queued(snapshot)
        # Cells never pass each other: with work waiting for room none may leave.
        return back or self._to_training(snapshot)

    def _back_for_queued(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """Training cells, satellites first, until the live work has room."""
        rollout = list(snapshot.heading(Role.ROLLOUT))
        moves: list[Move] = []
        for cell in sorted(_in_training(snapshot), key=lambda cell: _reluctance(cell, snapshot)):
            if snapshot.waterlevel == 0 or _room_for(snapshot, rollout, margin=0.0):
                break
            # When nobody else can serve, even the core does, whatever it was at.
            if rollout and not (self._settled(cell, snapshot) and _dispensable(cell, snapshot)):
                continue
            rollout.append(cell)
            moves.append(Move(cell.cell_id, Role.ROLLOUT, _queue_reason(snapshot)))
        return tuple(moves)

    def _to_training(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """Serving cells that the others can spare and that shorten the training."""
        staying = list(snapshot.serving())
        trainers = len(snapshot.heading(Role.TRAINING))
        moves: list[Move] = []
        for cell in sorted(staying, key=lambda cell: (not cell.is_core, cell.live, cell.cell_id)):
            others = [other for other in staying if other is not cell]
            spared = snapshot.waterlevel == 0 or (
                bool(others) and _room_for(snapshot, others, margin=self.headroom)
            )
            if not (spared and self._settled(cell, snapshot)):
                continue
            if not self._worth_it(cell, trainers, snapshot):
                continue
            staying = others
            trainers += 1
            moves.append(Move(cell.cell_id, Role.TRAINING, _spare_reason(snapshot, len(others))))
        return tuple(moves)

    def _settled(self, cell: CellView, snapshot: Snapshot) -> bool:
        return snapshot.time - cell.since >= self.dwell_s

    def _worth_it(self, cell: CellView, trainers: int, snapshot: Snapshot) -> bool:
        """Whether the training that is known to wait is enough to pay for the switch.

        The core has to train in any case, so that any sealed micro-step will do. A satellite beside
        n trainers saves work/n - work/(n + 1) seconds, and no more than there are micro-steps.
        """
        work, timings = snapshot.training, snapshot.timings
        # When all executions have ended, what is expected is certain to come.
        waiting = work.sealed if snapshot.waterlevel else work.expected - work.claimed
        if cell.is_core or trainers == 0:
            return waiting > 0
        seconds = waiting * timings.micro_step_s
        saved = seconds / trainers - seconds / (trainers + 1)
        cost = timings.to_training_s + timings.pull_s + timings.to_rollout_s
        return waiting > trainers and saved >= self.min_gain * cost


def _all_back(snapshot: Snapshot) -> tuple[Move, ...]:
    return tuple(
        Move(cell.cell_id, Role.ROLLOUT, "nothing is left to train")
        for cell in _in_training(snapshot)
    )


def _in_training(snapshot: Snapshot) -> tuple[CellView, ...]:
    return tuple(cell for cell in snapshot.cells if cell.role is Role.TRAINING)


def _dispensable(cell: CellView, snapshot: Snapshot) -> bool:
    """A satellite always; the core while it has nothing to train and its weights may serve."""
    idle = snapshot.training.sealed + snapshot.training.claimed == 0
    return not cell.is_core or (idle and snapshot.versions.allow(cell.version))


def _reluctance(cell: CellView, snapshot: Snapshot) -> tuple[bool, bool, str]:
    """Who comes back first: satellites, and among them those that need no other weights."""
    return (cell.is_core, not snapshot.versions.allow(cell.version), cell.cell_id)


def _room_for(snapshot: Snapshot, cells: Iterable[CellView], margin: float) -> bool:
    """Whether the cells can serve all live work, by executions and, where limited, by tokens."""
    cells = tuple(cells)
    if sum(cell.capacity for cell in cells) < snapshot.waterlevel * (1 + margin):
        return False
    limits = [cell.token_capacity for cell in cells if cell.token_capacity is not None]
    if len(limits) < len(cells):
        return True
    return sum(limits) >= snapshot.live_tokens * (1 + margin)


def _queue_reason(snapshot: Snapshot) -> str:
    return f"{snapshot.queued} queued of {snapshot.waterlevel} live executions find no room"


def _spare_reason(snapshot: Snapshot, staying: int) -> str:
    if snapshot.waterlevel == 0:
        return f"no live execution, {snapshot.training.expected} micro-steps to train"
    return (
        f"{staying} cells can serve the waterlevel of {snapshot.waterlevel}, "
        f"{snapshot.training.sealed} micro-steps wait"
    )
