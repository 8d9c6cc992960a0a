"""The two published baselines, as policies of the same interface."""

from __future__ import annotations

from dataclasses import dataclass

from cells.scheduler.policy import Pipeline, PolicyError
from cells.scheduler.snapshot import Move, Role, Snapshot


@dataclass(frozen=True, slots=True)
class Colocate:
    """All cells switch together: to training when the last execution has ended, back when done."""

    @property
    def name(self) -> str:
        """See `Policy.name`."""
        return "colocate"

    @property
    def pipeline(self) -> Pipeline:
        """Its own batch, trained when all of it is there."""
        return Pipeline(lag=0, streaming=False)

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """See `Policy.decide`."""
        work = snapshot.training
        if snapshot.waterlevel == 0 and work.expected > 0:
            return _send_all(snapshot, Role.TRAINING, "the last execution has ended")
        if work.expected == 0:
            return _send_all(snapshot, Role.ROLLOUT, "nothing is left to train")
        # Live work beside due samples happens after a resume: what is ready is finished first.
        if work.ready + work.claimed == 0:
            return _send_all(snapshot, Role.ROLLOUT, "live executions come before further training")
        return ()


@dataclass(frozen=True, slots=True)
class FixedSplit:
    """Async: the core and `training_cells` - 1 satellites train, the others serve, for ever.

    The first decision puts the cells in their places; afterwards none ever switches.
    """

    training_cells: int = 1
    streaming: bool = False

    @property
    def name(self) -> str:
        """See `Policy.name`."""
        return "async_streaming" if self.streaming else "async"

    @property
    def pipeline(self) -> Pipeline:
        """The batch before, so that rollout and training overlap across steps."""
        return Pipeline(lag=1, streaming=self.streaming)

    def __post_init__(self) -> None:
        """Refuse a split without a trainer."""
        if self.training_cells < 1:
            raise PolicyError(f"{self.name} needs at least one training cell")

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """See `Policy.decide`.

        Raises:
            PolicyError: if no cell would be left for rollouts.
        """
        if self.training_cells >= len(snapshot.cells):
            raise PolicyError(
                f"{self.name} with {self.training_cells} training cells needs more than "
                f"{len(snapshot.cells)} cells"
            )
        ordered = sorted(snapshot.cells, key=lambda cell: (not cell.is_core, cell.cell_id))
        places = {
            cell.cell_id: Role.TRAINING if rank < self.training_cells else Role.ROLLOUT
            for rank, cell in enumerate(ordered)
        }
        return tuple(
            Move(cell.cell_id, places[cell.cell_id], "its place in the fixed split")
            for cell in snapshot.cells
            if cell.role is not Role.SWITCHING and cell.role is not places[cell.cell_id]
        )


def _send_all(snapshot: Snapshot, role: Role, reason: str) -> tuple[Move, ...]:
    return tuple(
        Move(cell.cell_id, role, reason)
        for cell in snapshot.cells
        if cell.role is not Role.SWITCHING and cell.role is not role
    )
