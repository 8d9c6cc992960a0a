"""Policies side by side on the same executions: equal trained work, by construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from cells.scheduler import POLICY_NAMES, Policy, make_policy
from cells.simulation.bounds import Bounds, colocate_limit, lower_bounds
from cells.simulation.engine import simulate
from cells.simulation.outcome import Outcome
from cells.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds: its median and its extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True)
class Comparison:
    """The outcomes of every policy, each with the same seeds in the same order."""

    workload: Workload
    seeds: tuple[int, ...]
    outcomes: dict[str, tuple[Outcome, ...]]
    bounds: tuple[Bounds, ...]

    @property
    def colocate_limit(self) -> float:
        """The most that elastic can gain over Colocate with these cells."""
        return colocate_limit(self.workload.cells.count)

    def hours(self, policy: str) -> Spread:
        """Wall time in hours."""
        return Spread.over(outcome.hours for outcome in self.outcomes[policy])

    def staleness(self, policy: str) -> Spread:
        """Mean staleness in updates."""
        return Spread.over(outcome.mean_staleness for outcome in self.outcomes[policy])

    def ratio(self, slower: str, faster: str) -> Spread:
        """How many times longer `slower` takes, seed by seed."""
        pairs = zip(self.outcomes[slower], self.outcomes[faster], strict=True)
        return Spread.over(slow.seconds / fast.seconds for slow, fast in pairs)

    def share_of_bound(self, policy: str) -> Spread:
        """The lower bound of the policy's kind over its wall time."""
        pipeline = policy_for(self.workload, policy).pipeline
        pairs = zip(self.outcomes[policy], self.bounds, strict=True)
        return Spread.over(bound.of(pipeline) / outcome.seconds for outcome, bound in pairs)

    def training_wait(self, policy: str) -> Spread:
        """Share of its cells' time in training that they wait for micro-steps, step or weights."""
        return Spread.over(outcome.training_wait for outcome in self.outcomes[policy])

    @property
    def saved_by_streaming(self) -> Spread | None:
        """Share of Async's hours that streaming takes off; None where either was not simulated."""
        if not {"async", "async_streaming"} <= set(self.outcomes):
            return None
        kept = self.ratio("async_streaming", "async")
        return Spread(1 - kept.median, 1 - kept.high, 1 - kept.low)

    def query_share_beyond(self, policy: str, seconds: float) -> Spread:
        """Share of queries whose longest execution ran at least so long."""
        return Spread.over(_beyond(outcome, seconds)[0] for outcome in self.outcomes[policy])

    def timed_out_share_beyond(self, policy: str, seconds: float) -> Spread:
        """Among those queries, the share whose longest execution ended in the timeout."""
        return Spread.over(_beyond(outcome, seconds)[1] for outcome in self.outcomes[policy])


def policy_for(workload: Workload, name: str) -> Policy:
    """The policy as the workload's cells are split for it."""
    if name.startswith("async"):
        return make_policy(name, training_cells=workload.cells.async_training_cells)
    return make_policy(name)


def compare(
    workload: Workload,
    seeds: Sequence[int],
    policies: Sequence[str] = POLICY_NAMES,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Simulate every policy with every seed; `progress` is told what has ended.

    A workload with one cell leaves out the fixed splits, which need two.
    """
    outcomes: dict[str, tuple[Outcome, ...]] = {}
    for name in policies:
        if name.startswith("async") and workload.cells.count == 1:
            continue
        policy = policy_for(workload, name)
        outcomes[name] = tuple(simulate(workload, policy, seed) for seed in seeds)
        progress(f"{workload.name}: {name}")
    bounds = tuple(lower_bounds(workload, seed) for seed in seeds)
    return Comparison(workload, tuple(seeds), outcomes, bounds)


def _beyond(outcome: Outcome, seconds: float) -> tuple[float, float]:
    longest: dict[int, tuple[float, bool]] = {}
    for ended in outcome.executions:
        seen = longest.get(ended.query, (0.0, False))
        longest[ended.query] = max(seen, (ended.active_s, ended.timed_out))
    beyond = [timed_out for active, timed_out in longest.values() if active >= seconds]
    return len(beyond) / len(longest), sum(beyond) / len(beyond) if beyond else 0.0
