"""Adaptive against elastic in virtual time: the same executions, equal trained work.

Prints one JSON object: for each workload the gain over seeds, both mean stalenesses, the share of
the bound of all work, and why the policy chose its paces with the first seed. A workload without
a tail is among them. Run it with ``python -m tests.benchmarks.adaptive``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from cells.simulation.bounds import lower_bounds
from cells.simulation.compare import policy_for
from cells.simulation.engine import simulate
from cells.simulation.workload import Workload, load_workload
from configs.workloads import workload_path

WORKLOADS = (
    "published_122b_nl2repo",
    "published_122b_deepswe",
    "published_122b_terminalbench",
    "published_2_4t_nl2repo",
)
SHORT = "short-tailed 122B DeepSWE"


def workloads() -> Iterator[Workload]:
    """The published ones, and one whose executions all take about as long."""
    for name in WORKLOADS:
        yield load_workload(workload_path(name))
    data = load_workload(workload_path("published_122b_deepswe")).model_dump()
    data["name"] = SHORT
    data["durations"].update(sigma_query=0.1, sigma_execution=0.1, hung_share=0.0)
    yield Workload.model_validate(data)


def compare(workload: Workload, seeds: range) -> dict[str, Any]:
    """Both policies with every seed."""
    rows: list[dict[str, Any]] = []
    choices: list[str] = []
    for seed in seeds:
        elastic, adaptive = (
            simulate(workload, policy_for(workload, name), seed) for name in ("elastic", "adaptive")
        )
        bound = lower_bounds(workload, seed).work_s
        choices = choices or [f"{c.time:.0f} s: {c.reason}" for c in adaptive.choices]
        rows.append(
            {
                "seed": seed,
                "gain": elastic.seconds / adaptive.seconds,
                "hours": [elastic.hours, adaptive.hours],
                "mean_staleness": [elastic.mean_staleness, adaptive.mean_staleness],
                "max_staleness": [elastic.max_staleness, adaptive.max_staleness],
                "share_of_bound": [bound / elastic.seconds, bound / adaptive.seconds],
                "equal_tokens": abs(elastic.tokens / adaptive.tokens - 1) < 1e-9,
            }
        )
        print(workload.name, json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {
        "workload": workload.name,
        "gain": median(row["gain"] for row in rows),
        "least_gain": min(row["gain"] for row in rows),
        "mean_staleness": median(row["mean_staleness"][1] for row in rows),
        "share_of_bound": [median(row["share_of_bound"][n] for row in rows) for n in range(2)],
        "choices": choices,
        "seeds": rows,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    found = [compare(workload, seeds) for workload in workloads()]
    gains = [one["gain"] for one in found if one["workload"].startswith("122B")]
    print(json.dumps({"median_gain_122b": median(gains), "workloads": found}))


if __name__ == "__main__":
    main()
