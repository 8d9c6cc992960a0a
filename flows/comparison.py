"""The evaluations of a run beside each other: versions, gains between them, the ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.estimates import (
    Estimate,
    estimate,
    paired_gain,
    pass_at_k,
    share_interval,
    shown_ks,
)
from flows.held_out import HeldOut, ceiling_name, find_evaluations
from storage.objects import StorageError
from storage.records import Evaluation
from storage.run import Run, open_run


@dataclass(frozen=True)
class Result:
    """What one policy reached."""

    name: str
    """Of the policy: its version, or ``ceiling``."""
    evaluation: Evaluation
    pass_rate: Estimate
    pass_at: Mapping[int, Estimate]
    """By k; empty in results of older versions of Gyre."""


@dataclass(frozen=True)
class Gain:
    """Difference of two policies, paired over the problems that both were tried on."""

    before: str
    after: str
    pass_rate: Estimate


@dataclass(frozen=True)
class Comparison:
    """All that is stored about one set of held-out problems."""

    held_out: HeldOut
    versions: tuple[Result, ...]
    """In order."""
    ceiling: Result | None
    gains: tuple[Gain, ...]
    """Over the first version, and from the last one to the ceiling."""

    @property
    def gain(self) -> Gain | None:
        """Of the last version over the first."""
        last = self.versions[-1].name if self.versions else ""
        return next((gain for gain in self.gains if gain.after == last), None)

    @property
    def reached(self) -> float | None:
        """The last version's part of the way from the first version to the ceiling."""
        if self.ceiling is None or len(self.versions) < 2:
            return None
        first, last = self.versions[0].pass_rate.mean, self.versions[-1].pass_rate.mean
        room = self.ceiling.pass_rate.mean - first
        return (last - first) / room if room > 0 else None


def compare(run: Run, held_out: HeldOut | None = None) -> Comparison:
    """The stored evaluations of a run, on its own held-out problems when none are given."""
    chosen = held_out or HeldOut.of(run, None, None, None)
    versions = tuple(
        _result(str(version), found) for version, found in find_evaluations(run, chosen).items()
    )
    ceiling = _ceiling(run, chosen)
    pairs = [(versions[0], after) for after in versions[1:]]
    if ceiling is not None and versions:
        pairs.append((versions[-1], ceiling))
    gains = []
    for before, after in pairs:
        gained = paired_gain(before.evaluation.rates, after.evaluation.rates)
        if gained is not None:
            gains.append(Gain(before.name, after.name, gained))
    return Comparison(chosen, versions, ceiling, tuple(gains))


def comparison_value(comparison: Comparison) -> dict[str, Any]:
    """As an object for programs; rates and gains are shares."""
    held_out = comparison.held_out
    return {
        "problems": held_out.problems,
        "samples": held_out.samples,
        "seed": held_out.seed,
        "versions": [_result_value(result) for result in comparison.versions],
        "ceiling": None if comparison.ceiling is None else _result_value(comparison.ceiling),
        "gains": [
            {"before": gain.before, "after": gain.after, **_estimate_value(gain.pass_rate)}
            for gain in comparison.gains
        ],
        "reached": comparison.reached,
    }


def _ceiling(run: Run, held_out: HeldOut) -> Result | None:
    try:
        beside = open_run(run.store.url, ceiling_name(run.run_id))
    except StorageError:
        return None
    found = find_evaluations(beside, held_out).get(0)
    return None if found is None else _result("ceiling", found)


def _result(name: str, evaluation: Evaluation) -> Result:
    longest = max((len(rewards) for rewards in evaluation.rewards.values()), default=0)
    pass_at = {}
    for k in shown_ks(longest) if longest else ():
        found = pass_at_k(evaluation.rewards, k)
        if found is not None:
            pass_at[k] = found
    return Result(name, evaluation, estimate(list(evaluation.rates.values())), pass_at)


def _result_value(result: Result) -> dict[str, Any]:
    return {
        "policy": result.name,
        "pass_rate": _share_value(result.pass_rate),
        "pass_at": {str(k): _share_value(found) for k, found in result.pass_at.items()},
        "executions": result.evaluation.executions,
        "timed_out": result.evaluation.timed_out,
        "excluded": result.evaluation.excluded,
    }


def _share_value(found: Estimate) -> dict[str, Any]:
    return {**_estimate_value(found), "interval_95": list(share_interval(found))}


def _estimate_value(found: Estimate) -> dict[str, Any]:
    return {
        "mean": found.mean,
        "standard_error": found.standard_error,
        "interval_95": list(found.interval),
        "problems": found.count,
    }
