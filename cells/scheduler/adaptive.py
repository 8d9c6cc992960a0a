"""The pace of launches by what the run has measured: bursts, or groups that are carried over."""

from __future__ import annotations

from dataclasses import dataclass, field

from cells.scheduler.carry import Carry
from cells.scheduler.elastic import Elastic
from cells.scheduler.measured import Measured, Shape, Spell
from cells.scheduler.policy import Pipeline, PolicyError
from cells.scheduler.snapshot import Move, Pace, Snapshot

_LOSS = 1.06
"""Carried over, an update takes this much longer than its work alone: switches, steps, and places
that stay empty. From simulations of four workloads."""
_SLOWER = 1.05
"""Carried-over updates that take so much longer than those of bursts have shown that they do not
pay."""
_BELOW = 0.2
"""Updates that the window aims below the staleness of bursts: the last groups of a run, which are
launched together, are staler."""
_CORRECTION = 0.5
"""Updates by which the window is made smaller at most when the staleness was too high."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """The pace from now on, and why.

    `window` is how many groups may be launched and not trained, `serving_cells` how many cells are
    to serve while executions are queued.
    """

    pace: Pace
    window: int
    serving_cells: int
    reason: str


@dataclass(frozen=True, slots=True)
class Adaptive:
    """`Elastic` in bursts until the workload is known; then groups are carried over where it pays.

    Carrying over fills the time in which a burst waits for its last executions, but an update must
    not come faster than the staleness of bursts allows: the tokens of a group are as stale as
    updates are published between them and the group's end. Work near the time limit therefore stays
    in bursts, and so does what is unknown.

    `min_gain` is the share of a burst's time that has to be saved by what was measured. The other
    settings are those of `Elastic`.
    """

    min_gain: float = 0.03
    dwell_s: float = 0.0
    headroom: float = 0.0
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
        elastic = Elastic(dwell_s=self.dwell_s, headroom=self.headroom)
        object.__setattr__(self, "burst", elastic)
        object.__setattr__(self, "carry", Carry(dwell_s=self.dwell_s))

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """See `Policy.decide`."""
        rule = self.carry if snapshot.pace is Pace.CARRY else self.burst
        return rule.decide(snapshot)

    def pacing(self, seen: Measured, shape: Shape, left: int) -> Pacing:
        """The pace that the measurements speak for; bursts where they say too little.

        The driver asks when a burst is trained, and after each update while groups are carried
        over. `left` are the groups of the run that are not trained: the last ones are launched
        together, so that the run does not end with waiting for one of them.
        """
        bursts, carried = seen.bursts, seen.carried
        if shape.cells == 1 or shape.staleness == 0:
            return _burst(shape, "nothing to carry over with one cell, or one update in a burst")
        if bursts is None or len(bursts.groups) < shape.burst or shape.work_s(bursts) <= 0:
            return _burst(shape, "too few groups have ended to know the workload by")
        work_s = shape.work_s(bursts)
        loss = bursts.update_s / work_s
        fresh_s = bursts.lag_s / shape.staleness
        expected_s = max(work_s * _LOSS, fresh_s)
        words = (
            f"an update of a burst takes {bursts.update_s:.0f} s, its work {work_s:.0f} s "
            f"({shape.training_share(bursts):.0%} training); {fresh_s:.0f} s keep staleness at "
            f"{shape.staleness:g}, {bursts.timed_out_share:.0%} of the groups timed out"
        )
        if carried is not None and carried.updates >= shape.updates_per_burst:
            measured = carried.update_s / shape.work_s(carried)
            words += f"; carried over it takes {measured:.2f} of its work, in bursts {loss:.2f}"
            if measured > _SLOWER * loss:
                return _burst(shape, f"carrying over was slower: {words}")
        elif expected_s > (1 - self.min_gain) * bursts.update_s:
            return _burst(shape, f"too little to gain by carrying over: {words}")
        window = _window(carried or bursts, expected_s, shape, carried is not None)
        if left <= shape.burst:
            window = left
        share = 1 - shape.training_share(carried or bursts)
        serving = min(max(1, round(share * shape.cells)), shape.cells - 1)
        reason = f"carry over within {window} groups, {serving} cells serve: {words}"
        return Pacing(Pace.CARRY, window, serving, reason)


def _burst(shape: Shape, why: str) -> Pacing:
    return Pacing(Pace.BURST, shape.burst, 1, why)


def _window(spell: Spell, update_s: float, shape: Shape, carried: bool) -> int:
    """Groups that may be launched and not trained so that the mean staleness is that of bursts.

    Little's law: with w updates' worth of groups launched and not published, a group joins an
    update w - 1 updates after its launch; its tokens are younger than that by their age. What was
    measured corrects it.
    """
    target = shape.staleness - _BELOW
    wrong = target - spell.staleness if carried else 0.0
    updates = 1 + target + spell.age_s / update_s + max(-_CORRECTION, min(wrong, 0.0))
    return max(shape.groups_per_update, round(updates * shape.groups_per_update))
