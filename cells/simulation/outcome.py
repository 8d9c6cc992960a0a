"""What a simulation found out. Times are seconds of virtual time from the start of the run."""

from __future__ import annotations

from dataclasses import dataclass

from cells.scheduler import Pace, Role


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time in which a cell had one role."""

    cell_id: str
    role: Role
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Level:
    """The waterlevel at one moment, in executions."""

    time: float
    queued: int
    running: int


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step: when it was published and how stale its groups were, in updates.

    A group's staleness is the mean over its generated tokens; `oldest` is that of the oldest one.
    """

    time: float
    staleness: float
    tokens: float
    oldest: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A pace that an adaptive policy chose, and why."""

    time: float
    pace: Pace
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An execution that has ended: seconds of serving and tools, of waiting, and the reroutes."""

    query: int
    active_s: float
    waited_s: float
    reroutes: int
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run under one policy with one seed."""

    workload: str
    policy: str
    seed: int
    seconds: float
    updates: tuple[Update, ...]
    executions: tuple[Ended, ...]
    intervals: tuple[Interval, ...]
    levels: tuple[Level, ...]
    training_busy_s: float
    switches: int
    events: int
    choices: tuple[Choice, ...] = ()

    @property
    def hours(self) -> float:
        """Wall time in hours."""
        return self.seconds / 3600

    @property
    def tokens(self) -> float:
        """Tokens that went through forward and backward."""
        return sum(update.tokens for update in self.updates)

    @property
    def mean_staleness(self) -> float:
        """Updates between generation and training; every group counts alike, as in the loss."""
        return sum(update.staleness for update in self.updates) / len(self.updates)

    @property
    def max_staleness(self) -> float:
        """Staleness of the oldest token that was trained, in updates."""
        return max(update.oldest for update in self.updates)

    @property
    def switching_s(self) -> float:
        """Cell-seconds spent in switches."""
        return sum(i.end - i.start for i in self.intervals if i.role is Role.SWITCHING)

    @property
    def training_wait(self) -> float:
        """Share of the cells' time in training without a micro-step; zero if none ever trained."""
        there = sum(i.end - i.start for i in self.intervals if i.role is Role.TRAINING)
        return 1 - self.training_busy_s / there if there else 0.0
