"""What a policy sees and what it may answer: frozen records without behaviour of their own.

Times are seconds on one monotonic clock, whose zero does not matter. Counts are executions,
micro-steps or tokens, as each field says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Pace(StrEnum):
    """How new groups follow those that still run."""

    BURST = "burst"
    """A burst is launched when the one before it is trained."""
    CARRY = "carry"
    """Groups are launched one after another, as many as a window allows; those that still run go on
    under each new version."""


class Role(StrEnum):
    """What a cell is doing: serving executions, hosting a replica, or on its way between both."""

    ROLLOUT = "rollout"
    TRAINING = "training"
    SWITCHING = "switching"


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell at the moment of the snapshot.

    `target` is the role that a switching cell will have; it is None for any other cell.
    `since` is when the present role was entered. `live_tokens` and `token_capacity` are KV tokens;
    without a `token_capacity` only the number of executions limits the cell.
    """

    cell_id: str
    role: Role
    live: int
    is_core: bool
    capacity: int
    version: int
    target: Role | None = None
    since: float = 0.0
    live_tokens: int = 0
    token_capacity: int | None = None

    def __post_init__(self) -> None:
        """Refuse a switching cell without a target, and a target without a switch."""
        if (self.role is Role.SWITCHING) != (self.target is not None):
            raise ValueError(f"cell {self.cell_id}: a target goes with switching and only with it")

    @property
    def heading(self) -> Role:
        """The role it has or, while switching, is going to have."""
        return self.target or self.role


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """Micro-steps of the samples that are due and not yet accumulated into a gradient.

    `expected` counts all of them, also an estimate for groups that still run. `sealed` is the part
    whose groups are sealed and not yet claimed; `ready` is the part of `sealed` that the update
    under way may claim now; `claimed` runs on replicas at this moment and is in none of the other
    two. So expected >= sealed + claimed and sealed >= ready. `closing` says that all groups of the
    update under way are there and nothing of it is left to claim.
    """

    expected: int = 0
    sealed: int = 0
    ready: int = 0
    claimed: int = 0
    closing: bool = False

    def __post_init__(self) -> None:
        """Refuse counts that contradict each other."""
        if not (self.expected >= self.sealed + self.claimed and self.sealed >= self.ready >= 0):
            raise ValueError(f"contradictory training work: {self}")


@dataclass(frozen=True, slots=True)
class Timings:
    """Measured means, in seconds. The defaults of the switches are the published means."""

    to_training_s: float = 8.52
    to_rollout_s: float = 3.46
    pull_s: float = 0.0
    micro_step_s: float = 1.0


@dataclass(frozen=True, slots=True)
class VersionBounds:
    """The weight versions, both included, that may serve the executions that live now."""

    lowest: int = 0
    highest: int = 0

    def allow(self, version: int) -> bool:
        """Whether a cell that holds `version` can serve without loading other weights."""
        return self.lowest <= version <= self.highest


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a decision may depend on.

    `queued` executions wait for a cell, `running` ones are bound to one; `queued_tokens` are the
    KV tokens that the queued ones are expected to need. Where groups are carried over,
    `serving_cells` is how many cells shall serve at most while there is enough to train, `oldest`
    by how many updates the oldest token of a group that still runs is behind. `coming` is how many
    executions will be launched with the update under way, as soon as all of that is claimed,
    `may_wait` the share of a cell's places below which executions wait for others rather than hold
    it. `last` says that nothing will be launched any more, `overdue` that a call has waited for so
    long that a cell has to serve.
    """

    time: float
    queued: int
    running: int
    cells: tuple[CellView, ...]
    training: TrainingWork = field(default_factory=TrainingWork)
    timings: Timings = field(default_factory=Timings)
    versions: VersionBounds = field(default_factory=VersionBounds)
    queued_tokens: int = 0
    pace: Pace = Pace.BURST
    serving_cells: int = 1
    oldest: int = 0
    coming: int = 0
    may_wait: float = 0.0
    last: bool = False
    overdue: bool = False

    @property
    def waterlevel(self) -> int:
        """Executions queued and running."""
        return self.queued + self.running

    @property
    def live_tokens(self) -> int:
        """KV tokens of all live work."""
        return self.queued_tokens + sum(cell.live_tokens for cell in self.cells)

    def heading(self, role: Role) -> tuple[CellView, ...]:
        """Cells that have the role or are switching to it."""
        return tuple(cell for cell in self.cells if cell.heading is role)

    def serving(self) -> tuple[CellView, ...]:
        """Cells that serve rollouts now."""
        return tuple(cell for cell in self.cells if cell.role is Role.ROLLOUT)


@dataclass(frozen=True, slots=True)
class Move:
    """A cell, the role it shall take, and why, in words for the decisions table."""

    cell_id: str
    to: Role
    reason: str
