"""Learning with different trajectory caps, side by side; prints one JSON object.

    python -m tests.benchmarks.caps [--config branching] [--caps 1,2,5,none] [--seeds 1,2,3]
        [--root .gyre] [--set KEY=VALUE ...]

Trains one run for each cap and seed with ``gyre train``, one after the other: the real thing, for
hours. A run that storage has already is resumed, or only read when it has ended. For each cap:
held-out pass rate before and after (means over seeds, and each seed's), and the seconds that
updates, rollouts and switches took.
"""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

from flows.history import evaluations_of, updates_of
from storage.run import Run
from tests.benchmarks.trained import parser, trained


def main() -> None:
    """Train what is missing, then compare."""
    options = parser("caps", config="branching")
    options.add_argument("--caps", default="1,2,5,none")
    given = options.parse_args()
    result: dict[str, Any] = {}
    for cap in given.caps.split(","):
        settings = [f"trajectory.cap={cap}", "evaluation.every=0"]
        runs = [
            trained(given, f"cap-{cap}", int(seed), settings) for seed in given.seeds.split(",")
        ]
        seeds = [_measured(run) for run in runs]
        means = {
            name: fmean(one[name] for one in seeds)
            for name in seeds[0]
            if all(one[name] is not None for one in seeds)
        }
        result[cap] = {"mean": means, "seeds": seeds}
    print(json.dumps(result))


def _measured(run: Run) -> dict[str, float | None]:
    updates, evaluations = updates_of(run), evaluations_of(run)
    last = updates[-1].policy_version
    computed = [one.computed_tokens for one in updates if one.computed_tokens is not None]
    return {
        "pass_rate_before": evaluations[0].pass_rate if 0 in evaluations else None,
        "pass_rate_after": evaluations[last].pass_rate if last in evaluations else None,
        "train_s": sum(one.train_s for one in updates),
        "rollout_s": sum(one.rollout_s for one in updates),
        "switch_s": sum(one.switch_s for one in updates),
        "target_tokens": float(sum(one.target_tokens for one in updates)),
        "trained_tokens": float(sum(one.trained_tokens for one in updates)),
        "computed_tokens": float(sum(computed)) if computed else None,
    }


if __name__ == "__main__":
    main()
