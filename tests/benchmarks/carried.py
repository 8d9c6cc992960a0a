"""Carrying unfinished groups over against bursts: real runs of one workload, two pinned cells.

Prints one JSON object. The workload is that of ``policies``, with its tail of tools that wait, for
four steps: `adaptive` measures the first as a burst, and then chooses its pace by what it has seen.
``gain`` is how many times longer `elastic` takes for the same updates, from the first execution to
the last update. ``simulated`` is the same in virtual time, for the executions that each of the runs
recorded, with cells as fast as in it. Run it on an otherwise idle machine with
``python -m tests.benchmarks.carried``; ``--quotas`` holds four cells to half a core each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

from cells.simulation.compare import policy_for
from cells.simulation.engine import simulate
from cells.simulation.replay import replayed
from tests.benchmarks.series import Series, asked, made, train

POLICIES = ("elastic", "adaptive")
STEPS = "training.steps=4"


def every_run(series: Series, seeds: int) -> Iterator[dict[str, Any]]:
    """Policies take turns, so that what else the machine does meets both."""
    for seed in range(1, seeds + 1):
        for policy in POLICIES:
            yield train(series, policy, seed, short=False)


def simulated(series: Series, policy: str, seed: int) -> dict[str, Any]:
    """What a run's executions take under both policies, and what the pace was chosen by."""
    workload = replayed(series.recorded(policy, seed))
    elastic, adaptive = (simulate(workload, policy_for(workload, name)) for name in POLICIES)
    return {
        "run": workload.name,
        "seconds": [elastic.seconds, adaptive.seconds],
        "gain": elastic.seconds / adaptive.seconds,
        "mean_staleness": [elastic.mean_staleness, adaptive.mean_staleness],
        "choices": [f"{choice.time:.1f} s: {choice.reason}" for choice in adaptive.choices],
    }


def main() -> None:
    """Entry point."""
    series, seeds = asked(__doc__, STEPS)
    runs = made(series, every_run(series, seeds))
    took = {(run["policy"], run["seed"]): run["seconds"] for run in runs}
    gains = [took["elastic", seed] / took["adaptive", seed] for seed in range(1, seeds + 1)]
    virtual = [simulated(series, run["policy"], run["seed"]) for run in runs]
    foretold = [one["gain"] for one in virtual]
    report = {
        "gain": median(gains),
        "gains": gains,
        "simulated": median(foretold),
        "simulated_spread": [min(foretold), max(foretold)],
        "simulations": virtual,
        "runs": runs,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
