"""What a sample of executions says about a policy: means, intervals, pass@k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean, stdev

_SOLVED = 1 - 1e-9
"""A reward from which on a problem counts as solved; rewards are shares, in floating point."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over independent problems."""

    mean: float
    standard_error: float
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """Student's 95 % interval. Where there are fewer than two values it is (mean, mean)."""
        return self.interval_at(CONFIDENCE)

    def interval_at(self, confidence: float) -> tuple[float, float]:
        """Student's interval that holds the true mean with this probability."""
        if self.count < 2:
            return (self.mean, self.mean)
        from scipy.special import stdtrit  # half a second that most commands don't need

        quantile = float(stdtrit(self.count - 1, (1 + confidence) / 2))
        half = quantile * self.standard_error
        return (self.mean - half, self.mean + half)


def share_interval(found: Estimate) -> tuple[float, float]:
    """The interval of a mean of shares, which ends where shares do. With few problems Student's
    goes beyond."""
    low, high = found.interval
    return (max(low, 0.0), min(high, 1.0))


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values with its standard error.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("a mean needs a value")
    return Estimate(fmean(values), standard_error(values), len(values))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; 0 for fewer than two."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def paired_gain(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate | None:
    """Mean over the shared problems of (after - before); None where they share none.

    What makes a problem hard is the same on both sides and cancels, so that the standard error is
    that of the differences, not of two separate means.
    """
    shared = sorted(set(before) & set(after))
    return estimate([after[name] - before[name] for name in shared]) if shared else None


def pass_at_k(rewards: Mapping[str, Sequence[float]], k: int) -> Estimate | None:
    """Mean over problems of the chance that at least one of ``k`` executions solves the problem.

    Per problem the unbiased estimator 1 - C(n - c, k) / C(n, k) from n executions of which c solve
    it, meaning a reward of 1 (Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    section 2.1). Problems with fewer than ``k`` valid executions are left out; None where that
    leaves none.
    """
    values = []
    for one in rewards.values():
        n, c = len(one), sum(reward >= _SOLVED for reward in one)
        if n >= k:
            values.append(1 - comb(n - c, k) / comb(n, k))
    return estimate(values) if values else None


def shown_ks(samples: int) -> tuple[int, ...]:
    """Powers of two up to the number of executions of a problem, and that number itself."""
    powers = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    return tuple(sorted({*powers, samples}))
