"""Asks an adaptive policy for its pace, and says how many groups may be launched by now.

The simulator and the flow of a step tell what a run has done so far; what is kept in between are
the choices, so that another process goes on where they are recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from cells.scheduler.adaptive import Adaptive, Pacing
from cells.scheduler.measured import GroupSeen, Measured, Ran, Shape, Spell
from cells.scheduler.snapshot import Pace


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a run has done up to a moment.

    `staleness` has the mean of each update that is published, `busy_s` the seconds of replicas in
    the micro-steps of these, all together. `groups` are those that have ended, in that order,
    `running` the executions of the others, those that run with the ends that are expected of them.
    `serving_s` are the seconds that cells have served in the burst under way, all together;
    `launched` counts groups.
    """

    time: float
    staleness: Sequence[float]
    busy_s: float
    groups: Sequence[GroupSeen]
    launched: int
    running: Sequence[Sequence[Ran]] = ()
    serving_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A pace, how far the run was when it was chosen, and the bursts that it was chosen by."""

    pacing: Pacing
    time: float
    updates: int = 0
    busy_s: float = 0.0
    groups: int = 0
    bursts: Spell | None = None


class Pacer:
    """The pace of one run.

    Args:
        total: groups of the run.
        earlier: what was chosen before, oldest first. The run began at `SoFar.time` 0.
    """

    def __init__(
        self,
        policy: Adaptive,
        shape: Shape,
        total: int,
        earlier: Iterable[Choice] = (),
    ) -> None:
        self._policy = policy
        self._shape = shape
        self._total = total
        self._choices = [Choice(self._burst(""), time=0.0)]
        """Since the pace that rules now began."""
        self.pacing = self._choices[0].pacing
        self._bursts: Spell | None = None
        for choice in earlier:
            self._take(choice)

    def choose(self, so_far: SoFar) -> Choice | None:
        """The pace from now on; to be asked before the first launch and after each update until
        all is launched. None where a burst is under way and nothing is to be chosen."""
        done = self._burst_done(so_far)
        bursts, carried = self._bursts, None
        if self.pacing.pace is Pace.BURST:
            if not done and bursts is not None:
                return None
            bursts = self._since(self._choices[0], so_far) if done else self._first_burst(so_far)
        else:
            carried = self._carried(so_far)
        mean = self._shape.staleness
        excess = sum(staleness - mean for staleness in so_far.staleness)
        left = self._total - self._trained(so_far)
        pacing = self._policy.pacing(Measured(bursts, carried, excess), self._shape, left)
        if not done and pacing.pace is self.pacing.pace is Pace.BURST:
            return None
        updates, groups = len(so_far.staleness), len(so_far.groups)
        choice = Choice(pacing, so_far.time, updates, so_far.busy_s, groups, bursts)
        self._take(choice)
        return choice

    def allowed(self, so_far: SoFar) -> int:
        """How many groups may have been launched by now at the pace that was chosen: the whole of a
        burst when the one before it is trained, or what the window takes."""
        trained = self._trained(so_far)
        if self.pacing.pace is Pace.CARRY:
            most = trained + self.pacing.window
        else:
            most = trained + self._shape.burst if self._burst_done(so_far) else so_far.launched
        return max(min(most, self._total), so_far.launched)

    def coming(self, so_far: SoFar) -> int:
        """Groups that will be launched with the update under way, as far as is known."""
        if self.pacing.pace is not Pace.CARRY:
            return 0
        trained = self._trained(so_far) + self._shape.groups_per_update
        return max(0, min(trained + self.pacing.window, self._total) - so_far.launched)

    def _take(self, choice: Choice) -> None:
        self._bursts = choice.bursts
        if choice.pacing.pace is not self.pacing.pace:
            self._choices.clear()
        self._choices.append(choice)
        self.pacing = choice.pacing

    def _burst(self, why: str) -> Pacing:
        return Pacing(Pace.BURST, self._shape.burst, 1, why)

    def _trained(self, so_far: SoFar) -> int:
        return len(so_far.staleness) * self._shape.groups_per_update

    def _burst_done(self, so_far: SoFar) -> bool:
        # Less than an update's worth is left over where groups had been carried.
        return so_far.launched - self._trained(so_far) < self._shape.groups_per_update

    def _carried(self, so_far: SoFar) -> Spell | None:
        """The last updates of which all was launched at this pace."""
        burst = self._shape.updates_per_burst
        choices = self._choices[burst:][-2 * burst :]
        if not choices:
            return None
        # What was trained since was launched under the windows before.
        earlier = self._choices[: -burst // 2][-len(choices) :]
        return self._since(choices[0], so_far, fmean(one.pacing.window for one in earlier))

    def _since(self, then: Choice, so_far: SoFar, window: float = 0.0) -> Spell | None:
        """What was measured since then."""
        staleness = so_far.staleness[then.updates :]
        groups = so_far.groups[then.groups :]
        if not staleness or not groups:
            return None
        trained = len(staleness) * self._shape.groups_per_update
        return Spell(
            updates=len(staleness),
            update_s=(so_far.time - then.time) / len(staleness),
            train_s=(so_far.busy_s - then.busy_s) / trained,
            groups=groups,
            staleness=fmean(staleness),
            window=window,
        )

    def _first_burst(self, so_far: SoFar) -> Spell | None:
        """The first burst while it is trained, by what is expected of the groups that run."""
        if not so_far.staleness or not so_far.groups:
            return None
        train_s = so_far.busy_s / self._trained(so_far)
        ends = [ran.ended - so_far.time for group in so_far.running for ran in group]
        left_s = max(ends, default=0.0)
        working_s = self._shape.burst_update_s(so_far.serving_s + left_s, train_s)
        lasting_s = (so_far.time + left_s) / self._shape.updates_per_burst
        return Spell(
            updates=len(so_far.staleness),
            update_s=max(working_s, lasting_s),
            train_s=train_s,
            groups=[*so_far.groups, *(GroupSeen.of(group) for group in so_far.running)],
            running=len(so_far.running),
        )
