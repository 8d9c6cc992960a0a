"""Elastic cells against fixed and colocated ones: real runs of one workload, in equal shares of it.

Prints one JSON object. Each run is a `gyre train` of ``policies.yaml`` beside this file, with one
cell on each of two cores, so that an idle cell's core is not lent to the other; with ``--quotas``
there are four cells of half a core each, held to it by control groups. All runs make the same
number of updates of the same number of groups. Async trains the batch before, one update a step:
its staleness is 1 from the second update on, the mean of the 3 updates a step of the others. Run it
on an otherwise idle machine with ``python -m tests.benchmarks.policies``.

``simulated`` are the same ratios in virtual time, of the very executions that the runs recorded,
with cells as fast as in the colocated run; ``simulated_at_own_speed`` with cells as fast as each
run's were, which checks the simulator and foretells nothing. ``predicted_from_one_run`` tells by
how much each run's simulated seconds are off with cells as fast as in the first colocated run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

from cells.simulation.compare import policy_for
from cells.simulation.engine import simulate
from cells.simulation.replay import replayed
from cells.simulation.workload import Workload
from storage.run import Run, open_run
from tests.benchmarks.series import Series, asked, made, train

POLICIES = ("elastic", "colocate", "async")


def ratios(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over seeds of how many times longer a policy takes for the same updates, and of the
    same for a trained token: what an execution says, and so its tokens, differ from run to run."""
    found: dict[str, float] = {}
    for each, unit in (("", "updates"), ("_per_token", "target_tokens")):
        took = {(run["policy"], run["seed"]): run["seconds"] / run[unit] for run in runs}
        for slower in POLICIES[1:]:
            found[f"elastic_over_{slower}{each}"] = median(
                took[slower, seed] / took["elastic", seed] for seed in {seed for _, seed in took}
            )
    return found


def simulated(series: Series, seeds: int, *, own_speed: bool) -> dict[str, float]:
    """The same ratios in virtual time, of the executions that each run recorded.

    Args:
        own_speed: cells serve and train as fast as they did in that very run, and not as in the
            colocated run of the seed: the machine is not equally fast in all, and on few cores
            rollouts and training take each other's time.
    """
    found: dict[str, list[float]] = {}
    for seed in range(1, seeds + 1):
        cells = None if own_speed else replayed(series.recorded("colocate", seed))
        took = {name: simulated_s(series.recorded(name, seed), name, cells) for name in POLICIES}
        for slower in POLICIES[1:]:
            ratio = took[slower] / took["elastic"]
            found.setdefault(f"elastic_over_{slower}", []).append(ratio)
    return {name: median(values) for name, values in found.items()}


def predicted(series: Series, runs: list[dict[str, Any]]) -> dict[str, float]:
    """By how much the simulated seconds of every run are off, as a share of the recorded ones, with
    cells as fast as in one of them: the first colocated one."""
    cells = replayed(series.recorded("colocate", 1))
    return {
        run["run"]: simulated_s(open_run(str(series.root), run["run"]), run["policy"], cells)
        / run["seconds"]
        - 1
        for run in runs
    }


def simulated_s(run: Run, policy: str, cells: Workload | None = None) -> float:
    """Seconds that a recorded run's executions take in virtual time.

    Args:
        cells: serve and train as fast as in this recorded run; their own when left out.
    """
    workload = replayed(run)
    if cells is not None:
        changes = {"training": cells.training, "serving": cells.serving}
        workload = workload.model_copy(update=changes)
    return simulate(workload, policy_for(workload, policy)).seconds


def shares(real: dict[str, float], virtual: dict[str, float]) -> dict[str, float | None]:
    """How much of the gain in virtual time the real runs have."""
    return {
        name: (real[name] - 1) / (gain - 1) if gain > 1 else None for name, gain in virtual.items()
    }


def every_run(series: Series, seeds: int) -> Iterator[dict[str, Any]]:
    """Policies take turns, so that what else the machine does meets all of them."""
    for seed in range(1, seeds + 1):
        for policy in POLICIES:
            yield train(series, policy, seed, short=False)
    for policy in POLICIES:
        yield train(series, policy, 1, short=True)


def main() -> None:
    """Entry point."""
    series, seeds = asked(__doc__)
    runs = made(series, every_run(series, seeds))
    real = ratios([run for run in runs if not run["short"]])
    # What is foretold from one policy's runs; with each run's own speed it is a check, no forecast.
    foretold = simulated(series, seeds, own_speed=False)
    repeated = simulated(series, seeds, own_speed=True)
    report = {
        **real,
        "simulated": foretold,
        "share_of_simulated_gain": shares(real, foretold),
        "simulated_at_own_speed": repeated,
        "share_of_gain_at_own_speed": shares(real, repeated),
        "predicted_from_one_run": predicted(series, runs),
        "short_tasks": ratios([run for run in runs if run["short"]]),
        "runs": runs,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
