"""Learning with different trajectory caps, side by side; prints one JSON object.

    python -m tests.benchmarks.caps [--config branching] [--caps 1,2,5,none] [--seeds 1,2,3]
        [--root .gyre] [--set KEY=VALUE ...]

Trains one run for each cap and seed with ``gyre train``, one after the other: the real thing, for
hours. A run that storage has already is resumed, or only read when it has ended. For each cap:
held-out pass rate before and after (means over seeds, and each seed's), and the seconds that
updates, rollouts and switches took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import fmean
from typing import Any

from flows.history import evaluations_of, updates_of
from storage.objects import Store
from storage.run import Run, open_run


def main() -> None:
    """Train what is missing, then compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.caps")
    parser.add_argument("--config", default="branching")
    parser.add_argument("--caps", default="1,2,5,none")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--root", default=".gyre")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    for cap in given.caps.split(","):
        runs = [_trained(given, cap, int(seed)) for seed in given.seeds.split(",")]
        seeds = [_measured(run) for run in runs]
        means = {
            name: fmean(one[name] for one in seeds)
            for name in seeds[0]
            if all(one[name] is not None for one in seeds)
        }
        result[cap] = {"mean": means, "seeds": seeds}
    print(json.dumps(result))


def _trained(given: argparse.Namespace, cap: str, seed: int) -> Run:
    name = f"{given.config}-cap-{cap}-seed-{seed}"
    command = [sys.executable, "-m", "flows.cli", "train", "--root", given.root]
    if Store(given.root).exists(f"runs/{name}/config.yaml"):
        command += ["--resume", name]
    else:
        command += ["--config", given.config, "--seed", str(seed), "--name", name]
        settings = [f"trajectory.cap={cap}", "evaluation.every=0", *given.set]
        command += [part for setting in settings for part in ("--set", setting)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return open_run(given.root, name)


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
