"""What a sweep has shown: pass rates of its points over seeds, and what is more than noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import hypot
from statistics import fmean
from typing import Any

from flows.estimates import CONFIDENCE, Estimate, estimate, paired_gain, standard_error
from flows.history import evaluations_of, updates_of
from flows.sweep.plan import SweepPlan
from flows.sweep.share import find_shared
from storage.objects import StorageError, Store
from storage.records import Evaluation, StepDone, UpdateMetrics
from storage.run import Run, open_run


@dataclass(frozen=True)
class Trained:
    """One run of a sweep, as far as it is."""

    run_id: str
    point: int
    seed: int
    updates: tuple[UpdateMetrics, ...]
    evaluations: Mapping[int, Evaluation]
    """By version."""
    done: bool
    """All of its steps, and the evaluation after the last one."""
    shared: bool
    """Its first step trained the rollouts of the sweep's source."""

    @property
    def last(self) -> Evaluation | None:
        """The held-out result at its end; None before."""
        return self.evaluations[max(self.evaluations)] if self.done else None


@dataclass(frozen=True)
class Difference:
    """Of two points at their ends: the better one minus the other."""

    better: int
    other: int
    gain: Estimate
    over: str
    """What the pairs are: ``seeds``, or ``problems`` where there is one seed."""
    confidence: float
    """Of the interval: as many pairs of points were looked at, this one's is so much wider."""

    @property
    def interval(self) -> tuple[float, float]:
        return self.gain.interval_at(self.confidence)

    @property
    def beyond_noise(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.gain.count > 1 and self.interval[0] > 0


@dataclass(frozen=True)
class Results:
    """A sweep at one moment."""

    plan: SweepPlan
    runs: tuple[Trained, ...]
    points: tuple[Estimate | None, ...]
    """By point: the held-out pass rate at the end, over the seeds that have one."""
    best: int | None
    """The point with the highest one."""
    differences: tuple[Difference, ...]
    """Between the best point and each other one."""

    def of_point(self, point: int) -> list[Trained]:
        return [run for run in self.runs if run.point == point]

    @property
    def done(self) -> int:
        """How many runs are."""
        return sum(run.done for run in self.runs)


def read_results(store: Store, plan: SweepPlan) -> Results:
    """Read what the runs of a sweep have stored.

    Raises:
        StorageError: storage can't be read.
        RecordError: something in it is of another version of Gyre.
    """
    runs = tuple(_trained(store, one.run_id, one.point, one.seed) for one in plan.runs)
    points = tuple(
        _mean([run for run in runs if run.point == number]) for number in range(len(plan.points))
    )
    known = [number for number, found in enumerate(points) if found is not None]
    best = max(known, key=lambda number: _rate(points[number]), default=None)
    differences = () if best is None else tuple(_differences(runs, known, best))
    return Results(plan, runs, points, best, differences)


def verdict_line(results: Results) -> str:
    """Which point wins, in a sentence."""
    plan, best = results.plan, results.best
    if best is None:
        return "No run has ended yet."
    name = plan.points[best].label
    if results.done < len(plan.runs):
        return f"{results.done} of {len(plan.runs)} runs are done; {name} leads so far."
    if not results.differences:
        return f"{name}: pass rate {_rate(results.points[best]):.3f}."
    unclear = [one for one in results.differences if not one.beyond_noise]
    if not unclear:
        least = min(results.differences, key=lambda one: one.gain.mean)
        low, high = least.interval
        return (
            f"{name} wins: {least.gain.mean:+.3f} over {plan.points[least.other].label}, the next "
            f"best ({low:+.3f} to {high:+.3f}), more than noise."
        )
    names = "; ".join(plan.points[one.other].label for one in unclear)
    return f"{name} has the highest pass rate, but is within noise of: {names}."


def results_value(results: Results) -> dict[str, Any]:
    """As an object for programs; rates and gains are shares."""
    plan = results.plan
    return {
        "sweep": plan.name,
        "from_run": plan.from_run,
        "axes": {one.key: list(one.values) for one in plan.axes},
        "seeds": list(plan.seeds),
        "done": results.done,
        "runs": len(plan.runs),
        "points": [
            {
                "label": point.label,
                "values": list(point.values),
                "pass_rate": None if found is None else found.mean,
                "interval_95": None if found is None else list(found.interval),
                "seeds": {
                    run.seed: run.last.pass_rate
                    for run in results.of_point(number)
                    if run.last is not None
                },
            }
            for number, (point, found) in enumerate(zip(plan.points, results.points, strict=True))
        ],
        "best": None if results.best is None else plan.points[results.best].label,
        "differences": [
            {
                "better": plan.points[one.better].label,
                "other": plan.points[one.other].label,
                "mean": one.gain.mean,
                "pairs": one.gain.count,
                "over": one.over,
                "confidence": one.confidence,
                "interval": list(one.interval),
                "beyond_noise": one.beyond_noise,
            }
            for one in results.differences
        ],
        "verdict": verdict_line(results),
    }


def _trained(store: Store, run_id: str, point: int, seed: int) -> Trained:
    try:
        run = open_run(store.url, run_id)
    except StorageError:
        return Trained(run_id, point, seed, (), {}, done=False, shared=False)
    evaluations = evaluations_of(run)
    return Trained(
        run_id=run_id,
        point=point,
        seed=seed,
        updates=tuple(updates_of(run)),
        evaluations=evaluations,
        done=is_done(run, evaluations),
        shared=find_shared(run) is not None,
    )


def is_done(run: Run, evaluations: Mapping[int, Evaluation]) -> bool:
    """Whether a run has done all its steps and evaluated the version that the last one left."""
    key = run.layout.step_done(run.config.training.steps - 1)
    if not run.store.exists(key):
        return False
    return run.store.read_record(key, StepDone).policy_version in evaluations


def _mean(runs: Sequence[Trained]) -> Estimate | None:
    rates = [run.last.pass_rate for run in runs if run.last is not None]
    return estimate(rates) if rates else None


def _rate(found: Estimate | None) -> float:
    return -1.0 if found is None else found.mean


def _differences(runs: Sequence[Trained], known: Sequence[int], best: int) -> list[Difference]:
    """The best one was not known before, so every pair of points counts as looked at
    (Bonferroni)."""
    pairs = len(list(combinations(known, 2)))
    confidence = 1 - (1 - CONFIDENCE) / max(pairs, 1)
    found = []
    for other in known:
        gain, over = _paired(_ends(runs, other), _ends(runs, best))
        if other != best and gain is not None:
            found.append(Difference(best, other, gain, over, confidence))
    return found


def _ends(runs: Sequence[Trained], point: int) -> dict[int, Evaluation]:
    return {run.seed: run.last for run in runs if run.point == point and run.last is not None}


def _paired(
    before: Mapping[int, Evaluation], after: Mapping[int, Evaluation]
) -> tuple[Estimate | None, str]:
    """The mean difference over the seeds that both have.

    Every run is tried on the same problems, so that other seeds and other problems are two sources
    of noise: the variances of both means are added, with the degrees of freedom of the seeds. Runs
    that happen to agree are not exact: the error is at least that of half a problem in each.
    With one seed the pairs are its problems, which tells nothing of another seed.
    """
    shared = sorted(set(before) & set(after))
    if len(shared) < 2:
        one = shared[0] if shared else None
        rates = paired_gain(before[one].rates, after[one].rates) if one is not None else None
        return rates, "problems"
    gains = [after[seed].pass_rate - before[seed].pass_rate for seed in shared]
    seeds = estimate(gains)
    problems = set.intersection(
        *(set(side[seed].rates) for side in (before, after) for seed in shared)
    )
    by_problem = [
        fmean(after[seed].rates[name] - before[seed].rates[name] for seed in shared)
        for name in problems
    ]
    floor = 0.5 / (max(len(problems), 1) * len(shared) ** 0.5)
    error = max(hypot(seeds.standard_error, standard_error(by_problem)), floor)
    return Estimate(seeds.mean, error, seeds.count), "seeds"
