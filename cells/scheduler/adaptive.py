"""The pace of launches by what the run has measured: bursts, or groups that are carried over."""

from __future__ import annotations

from dataclasses import dataclass, field

from cells.scheduler.carry import Carry
from cells.scheduler.elastic import Elastic
from cells.scheduler.measured import Measured, Shape, Spell
from cells.scheduler.policy import Pipeline, PolicyError
from cells.scheduler.snapshot import Move, Pace, Snapshot

_SLOWER = 1.05
"""Carried-over updates that take so much longer than those of bursts have shown that they do not
pay."""
_WORTH = 2
"""Bursts that must be left to go back to them: the first waits for all that runs, and what is left
over by the last is a burst of its own."""
_WITHIN = 1.1
"""Updates' worth of groups by which a window exceeds the mean staleness that it gives. A group that
joins the update under way is not stale, and a long execution goes on under newer versions. From
simulations of four workloads."""
_END = 0.6
"""Updates by which the last groups of a run, which are launched together, are staler than others.
From simulations, as the above."""
_REPAID = 0.3
"""Updates by which the window aims above or below the staleness of bursts at most."""
_CORRECTION = 0.25
"""Updates' worth of groups by which what was measured changes the window at most."""
_AMPLE = 0.3
"""Share of an update's time that staleness leaves free beyond which a smaller window costs none."""
_SPARED = 0.5
"""Updates by which the window aims lower for all of an update's time beyond that share."""
_WAITING = (0.2, 0.35)
"""Share of a cell's places below which executions wait rather than hold it: least and most."""
_NARROWEST = 1.25
"""Updates' worth of groups that may be launched at least: with less the training would wait."""
_UNKNOWN = 0.25
"""Share of a burst that may still run when it is judged."""
_PATIENCE = 0.75
"""Share of the largest staleness from which a group is not kept waiting for a cell."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """The pace from now on, and why.

    `window` is how many groups may be launched and not trained, `serving_cells` how many cells are
    to serve at most, `may_wait` the share of a cell's places below which executions wait.
    """

    pace: Pace
    window: int
    serving_cells: int
    reason: str
    may_wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Adaptive:
    """`Elastic` in bursts until the workload is known; then groups are carried over where it pays.

    Carrying over fills the time in which a burst waits for its last executions, but an update must
    not come faster than the staleness of bursts allows: the tokens of a group are as stale as
    updates are published between them and the group's end. Work near the time limit therefore stays
    in bursts, and so does what is unknown.

    `min_gain` is the share of a burst's time that has to be saved by what was measured; with
    `always` nothing is measured, and groups are carried over wherever they can be.
    `max_staleness` is the largest difference, in updates, between the version of a token and the
    one that it trains: an update waits for a group that would exceed it in the next. The other
    settings are those of `Elastic`.
    """

    min_gain: float = 0.03
    max_staleness: int = 8
    dwell_s: float = 0.0
    headroom: float = 0.0
    always: bool = False
    burst: Elastic = field(init=False)
    carry: Carry = field(init=False)

    @property
    def name(self) -> str:
        """See `Policy.name`."""
        return "adaptive"

    @property
    def pipeline(self) -> Pipeline:
        """Its own batch as it is sealed, and what was carried over into it."""
        return Pipeline(lag=0, streaming=True, carries=True)

    def __post_init__(self) -> None:
        """Refuse settings below zero."""
        if not 0 <= self.min_gain < 1:
            raise PolicyError("min_gain must be a share, at least 0 and below 1")
        if self.max_staleness < 0:
            raise PolicyError("max_staleness cannot be negative")
        elastic = Elastic(dwell_s=self.dwell_s, headroom=self.headroom)
        object.__setattr__(self, "burst", elastic)
        patience = int(_PATIENCE * self.max_staleness)
        object.__setattr__(self, "carry", Carry(dwell_s=self.dwell_s, patience=patience))

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """See `Policy.decide`."""
        # A core whose satellites have all failed has to take turns.
        carries = snapshot.pace is Pace.CARRY and len(snapshot.cells) > 1
        return (self.carry if carries else self.burst).decide(snapshot)

    def holds(self, oldest: int) -> bool:
        """Whether a complete update has to wait for a group that still runs and whose oldest token
        is `oldest` updates old. The group joins the next update only if it ends before that is
        full, and the one after that only if this one is waited for."""
        return oldest >= self.max_staleness - 1

    def pacing(self, seen: Measured, shape: Shape, left: int) -> Pacing:
        """The pace that the measurements speak for; bursts where they say too little.

        The driver asks after each update until the first burst is trained, then when a burst is
        trained, and after each update while groups are carried over. `left` are the groups of the
        run that are not trained: the last ones are launched together, so that the run does not end
        with waiting for one of them.
        """
        bursts, carried = seen.bursts, seen.carried
        tight = self.max_staleness < shape.updates_per_burst
        if shape.cells == 1 or shape.staleness == 0 or tight:
            return _burst(shape, "nothing to carry over: one cell, or staleness allows no more")
        if self.always:
            window = round(max(shape.staleness + _WITHIN, _NARROWEST) * shape.groups_per_update)
            reason = f"carry over within {window} groups, as the settings ask for"
            return Pacing(Pace.CARRY, window, shape.cells - 1, reason, _WAITING[0])
        if bursts is None or len(bursts.groups) < shape.burst or shape.work_s(bursts) <= 0:
            return _burst(shape, "too few groups have ended to know the workload by")
        if bursts.running > _UNKNOWN * shape.burst:
            return _burst(shape, f"{bursts.running} of the groups still run")
        fresh_s = bursts.lag_s / shape.staleness
        expected_s = max(shape.carried_s(bursts), fresh_s)
        words = (
            f"an update of a burst takes {bursts.update_s:.0f} s, carried over "
            f"{shape.carried_s(bursts):.0f} s ({shape.training_share(bursts):.0%} training); "
            f"{fresh_s:.0f} s keep staleness at {shape.staleness:g}, "
            f"{bursts.timed_out_share:.0%} of the groups timed out"
        )
        slower = False
        if carried is not None and carried.updates >= shape.updates_per_burst:
            measured = carried.update_s / shape.work_s(carried)
            loss = bursts.update_s / shape.work_s(bursts)
            words += f"; carried over it takes {measured:.2f} of its work, in bursts {loss:.2f}"
            # An estimate of a burst that still runs is too low where its last executions are long.
            slower = bursts.running == 0 and measured > _SLOWER * loss
            if slower and left >= _WORTH * shape.burst:
                return _burst(shape, f"carrying over was slower: {words}")
        elif expected_s > (1 - self.min_gain) * bursts.update_s:
            return _burst(shape, f"too little to gain by carrying over: {words}")
        ending = _ending(bursts, shape, expected_s)
        slack = max(1 - fresh_s / shape.carried_s(bursts), 0.0)
        last = left <= (shape.burst if slower else ending)
        window = left if last else _window(seen, shape, left, ending, slack)
        may_wait = max(_WAITING[0], min(slack, _WAITING[1]))
        share = 1 - shape.training_share(carried or bursts)
        serving = min(round(share * shape.cells) + 1, shape.cells - 1)
        reason = (
            f"carry over within {window} groups, at most {serving} cells serve, each while it is "
            f"filled to {may_wait:.0%}: {words}"
        )
        return Pacing(Pace.CARRY, window, serving, reason, may_wait)


def _burst(shape: Shape, why: str) -> Pacing:
    return Pacing(Pace.BURST, shape.burst, 1, why)


def _ending(bursts: Spell, shape: Shape, update_s: float) -> int:
    """Groups that are launched together at the end of a run: as many as train while the longest of
    them runs, and a burst at most."""
    return min(round(bursts.span_s / update_s * shape.groups_per_update), shape.burst)


def _window(seen: Measured, shape: Shape, left: int, ending: int, slack: float) -> int:
    """Groups that may be launched and not trained so that the mean staleness is that of bursts.

    Little's law: with w updates' worth of groups launched and not published, a group joins an
    update w - 1 updates after its launch. A window that varies costs more time than it saves in
    staleness, so that what was measured moves it by half, and little.
    """
    ahead = max((left - ending) / shape.groups_per_update, 1.0)
    owed = (seen.excess + _END * ending / shape.groups_per_update) / ahead
    target = shape.staleness - max(-_REPAID, min(owed, _REPAID))
    target -= _SPARED * max(slack - _AMPLE, 0.0)
    updates = target + _WITHIN
    carried = seen.carried
    if carried is not None and carried.updates >= shape.updates_per_burst:
        within = carried.window / shape.groups_per_update - carried.staleness
        updates += max(-_CORRECTION, min((within - _WITHIN) / 2, _CORRECTION))
    return round(max(updates, _NARROWEST) * shape.groups_per_update)
