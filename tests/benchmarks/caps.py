"""Learning with different trajectory caps, side by side; prints one JSON object.

    python -m tests.benchmarks.caps [--config branching] [--caps 1,2,5,none] [--seeds 1,2,3]
        [--root .gyre] [--set KEY=VALUE ...]

Trains one run for each cap and seed with ``gyre train``, one after the other: the real thing, for
hours. A run that storage has already is resumed, or only read when it has ended. Runs of one seed
share the rollouts of their first step, which no cap has touched yet. For each cap: held-out pass
rate before and after (means over seeds, and each seed's), pass rate of the training batches, the
seconds that updates, rollouts and switches took, and tokens: sampled ones that are trained, all of
the samples, and computed ones. ``against_first``: by cap, the mean over seeds of what is gained on
the first cap at the end, and the share of the updates' seconds that is saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from flows.history import evaluations_of, updates_of
from storage.run import Run
from tests.benchmarks.trained import parser, trained

Figures = dict[str, float | None]


def main() -> None:
    """Train what is missing, then compare."""
    options = parser("caps", config="branching")
    options.add_argument("--caps", default="none,5,2,1")
    given = options.parse_args()
    caps = given.caps.split(",")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    found: dict[str, list[Figures]] = {cap: [] for cap in caps}
    for seed in seeds:  # when it is stopped early, what is there compares all caps
        first: Run | None = None
        for cap in caps:
            settings = [f"trajectory.cap={cap}", "evaluation.every=0"]
            run = trained(given, f"cap-{cap}", seed, settings, first)
            found[cap].append(_measured(run))
            first = first or run
    result: dict[str, Any] = {
        "workload": {"config": given.config, "set": given.set, "seeds": seeds},
        **{cap: {"mean": _means(own), "seeds": own} for cap, own in found.items()},
        "against_first": {cap: _against(found[caps[0]], found[cap]) for cap in caps[1:]},
    }
    print(json.dumps(result))


def _measured(run: Run) -> Figures:
    updates, evaluations = updates_of(run), evaluations_of(run)
    last = updates[-1].policy_version
    computed = [one.computed_tokens for one in updates if one.computed_tokens is not None]
    return {
        "pass_rate_before": evaluations[0].pass_rate if 0 in evaluations else None,
        "pass_rate_after": evaluations[last].pass_rate if last in evaluations else None,
        "batch_pass_rate": _mean(one.pass_rate for one in updates),
        "train_s": sum(one.train_s for one in updates),
        "rollout_s": sum(one.rollout_s for one in updates),
        "switch_s": sum(one.switch_s for one in updates),
        "target_tokens": float(sum(one.target_tokens for one in updates)),
        "trained_tokens": float(sum(one.trained_tokens for one in updates)),
        "computed_tokens": float(sum(computed)) if computed else None,
    }


def _against(first: list[Figures], other: list[Figures]) -> Figures:
    pairs = list(zip(first, other, strict=True))
    return {
        "pass_rate_gained": _mean(
            after - before
            for before, after in ((a["pass_rate_after"], b["pass_rate_after"]) for a, b in pairs)
            if before is not None and after is not None
        ),
        "train_s_saved": _mean(
            1 - after / before
            for before, after in ((a["train_s"], b["train_s"]) for a, b in pairs)
            if before and after is not None
        ),
    }


def _means(seeds: list[Figures]) -> Figures:
    return {name: _mean(one[name] for one in seeds) for name in seeds[0]}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


if __name__ == "__main__":
    main()
