"""What a run has measured of its workload, as a policy sees it when it chooses a pace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

_EMPTY = 0.5
"""Cells' worth of places that stay empty where groups are carried over."""
_WAITS = 1.04
"""An update takes this much longer than its work: for its last micro-steps, the step, switches.
This and the above are from simulations of four workloads."""


@dataclass(frozen=True, slots=True)
class Ran:
    """An execution: when it began and ended, in seconds, whether at a limit, and how long it held
    no place in between."""

    began: float
    ended: float
    timed_out: bool
    waited_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it held a place."""
        return self.ended - self.began - self.waited_s

    @classmethod
    def expected(cls, began: float, now: float, limit_s: float) -> Ran:
        """Of an execution that runs: it is taken to run as long again, up to its limit."""
        ended = began + min(2 * (now - began), limit_s)
        return cls(began, ended, ended - began == limit_s)


@dataclass(frozen=True, slots=True)
class GroupSeen:
    """A group whose executions have all ended; times in seconds, means over its generated tokens.

    `place_s` is how long its executions held a place, all together. `lag_s` is the time between a
    token and the end of the group, which no schedule can take from its staleness. `span_s` is the
    time from its first token to its end. `timed_out` tells of its longest execution.
    """

    place_s: float
    lag_s: float
    span_s: float
    timed_out: bool

    @classmethod
    def of(cls, executions: Iterable[Ran]) -> GroupSeen:
        """Of the executions of a group, at least one; tokens are taken to come at one speed."""
        ran = tuple(executions)
        end = max(one.ended for one in ran)
        total = sum(one.seconds for one in ran)
        if total <= 0:
            return cls(0.0, 0.0, 0.0, any(one.timed_out for one in ran))
        lag = sum(one.seconds * (end - (one.began + one.ended) / 2) for one in ran) / total
        span = end - min(one.began for one in ran)
        longest = max(ran, key=lambda one: one.seconds)
        return cls(total, lag, span, longest.timed_out)


@dataclass(frozen=True, slots=True)
class Spell:
    """Updates that were made at one pace: how long they took, and the work that was in them.

    `update_s` are seconds of an update, `train_s` a replica's seconds for a group, `groups` those
    that ended in the time, at least one. `staleness` is the mean of the updates, `window` that of
    the groups that might be launched and not trained. The last `running` of the groups have not
    ended: their times, and `update_s`, are estimates.
    """

    updates: int
    update_s: float
    train_s: float
    groups: Sequence[GroupSeen]
    staleness: float = 0.0
    window: float = 0.0
    running: int = 0

    @property
    def place_s(self) -> float:
        """Mean seconds of places that a group takes."""
        return fmean(group.place_s for group in self.groups)

    @property
    def lag_s(self) -> float:
        """Mean seconds from a token to the end of its group."""
        return fmean(group.lag_s for group in self.groups)

    @property
    def span_s(self) -> float:
        """Seconds of the longest group."""
        return max(group.span_s for group in self.groups)

    @property
    def timed_out_share(self) -> float:
        """Share of the groups whose longest execution ended at a limit."""
        return fmean(group.timed_out for group in self.groups)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run knows of its workload: its bursts, and what it has carried over of late.

    `excess` adds up, over all updates so far, by how much they were staler than those of bursts are
    in the mean.
    """

    bursts: Spell | None = None
    carried: Spell | None = None
    excess: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run has fixed: its cells, and how groups become updates and bursts."""

    cells: int
    capacity: int
    groups_per_update: int
    updates_per_burst: int

    def work_s(self, spell: Spell) -> float:
        """Seconds of one of its updates if no cell were ever idle."""
        serving_s = spell.place_s / self.capacity
        return self.groups_per_update * (serving_s + spell.train_s) / self.cells

    def carried_s(self, spell: Spell) -> float:
        """Seconds that one of its updates is expected to take where groups are carried over."""
        return self.work_s(spell) * self.cells / (self.cells - _EMPTY) * _WAITS

    def burst_update_s(self, serving_s: float, train_s: float) -> float:
        """Seconds of an update of a burst, from the seconds that cells serve it, all together, and
        those that a replica trains a group."""
        train = self.groups_per_update * train_s
        return (serving_s / self.updates_per_burst + train) / self.cells * _WAITS

    def training_share(self, spell: Spell) -> float:
        """Share of the cells' work that is training."""
        serving_s = spell.place_s / self.capacity
        return spell.train_s / (spell.train_s + serving_s)

    @property
    def burst(self) -> int:
        """Groups of a burst."""
        return self.groups_per_update * self.updates_per_burst

    @property
    def staleness(self) -> float:
        """Mean staleness of bursts, (0 + 1 + ... + n - 1)/n, in updates."""
        return (self.updates_per_burst - 1) / 2
