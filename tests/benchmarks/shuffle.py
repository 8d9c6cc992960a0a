"""What the order of training does to learning; prints one JSON object.

    python -m tests.benchmarks.shuffle [--config quickstart] [--orders arrival,window,global]
        [--seeds 1,2,3] [--root .gyre] [--set KEY=VALUE ...]

Streaming trains groups in the order in which they end: those whose executions are quick first.
Here the same settings are trained once for each order and seed with ``gyre train``, one run after
the other: the real thing, for hours. A run that storage has already is resumed, or only read when
it has ended. ``global`` is the order without that bias, and waits for the last group of a step.

For each order, the means over seeds and each seed's figures: held-out pass rate before, after, and
over all evaluations; the mean pass rate of the training batches; staleness; and for what the bias
itself is, the mean pass rate of a step's last update minus that of its first one. Under ``gain``,
by seed, how far ``arrival`` and ``window`` end above (or below) ``global``.
"""

from __future__ import annotations

import argparse
import json
from statistics import fmean
from typing import Any

from flows.history import evaluations_of, updates_of
from storage.records import UpdateMetrics
from storage.run import Run
from tests.benchmarks.trained import parser, trained

Figures = dict[str, float | None]
BASELINE = "global"


def main() -> None:
    """Train what is missing, then compare."""
    options = parser("shuffle", config="quickstart")
    options.add_argument("--orders", default="arrival,window,global")
    given = options.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    orders = given.orders.split(",")
    # Seed by seed: when it is stopped early, what is there compares all orders.
    found = {
        seed: {
            one: _measured(trained(given, f"order-{one}", seed, [f"training.shuffle={one}"]))
            for one in orders
        }
        for seed in seeds
    }
    result: dict[str, Any] = {"workload": _workload(given)}
    for order in orders:
        own = [found[seed][order] for seed in seeds]
        result[order] = {"mean": _means(own), "seeds": dict(zip(seeds, own, strict=True))}
    if BASELINE in orders:
        result["gain"] = {
            order: {seed: _gain(found[seed], order) for seed in seeds}
            for order in orders
            if order != BASELINE
        }
    print(json.dumps(result))


def _workload(given: argparse.Namespace) -> dict[str, Any]:
    return {"config": given.config, "set": given.set, "seeds": given.seeds}


def _measured(run: Run) -> Figures:
    updates, evaluations = updates_of(run), evaluations_of(run)
    held_out = [evaluations[version].pass_rate for version in sorted(evaluations)]
    last = updates[-1].policy_version
    return {
        "pass_rate_before": evaluations[0].pass_rate if 0 in evaluations else None,
        "pass_rate_after": evaluations[last].pass_rate if last in evaluations else None,
        "pass_rate_over_evaluations": fmean(held_out) if held_out else None,
        "batch_pass_rate": _mean(update.pass_rate for update in updates),
        "last_minus_first_update": _bias(updates),
        "staleness_mean": fmean(update.staleness_mean for update in updates),
        "clip_fraction": fmean(update.clip_fraction for update in updates),
        "step_s": (updates[-1].ended_at - updates[0].ended_at) / max(1, updates[-1].step),
    }


def _bias(updates: list[UpdateMetrics]) -> float | None:
    """How much better the groups of a step's last update are solved than those of its first."""
    steps: dict[int, list[float | None]] = {}
    for update in updates:
        steps.setdefault(update.step, []).append(update.pass_rate)
    return _mean(
        own[-1] - own[0]
        for own in steps.values()
        if len(own) > 1 and own[0] is not None and own[-1] is not None
    )


def _gain(found: dict[str, Figures], order: str) -> float | None:
    ends = [found[one]["pass_rate_after"] for one in (order, BASELINE)]
    return None if ends[0] is None or ends[1] is None else ends[0] - ends[1]


def _means(seeds: list[Figures]) -> Figures:
    return {name: _mean(one[name] for one in seeds) for name in seeds[0]}


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


if __name__ == "__main__":
    main()
