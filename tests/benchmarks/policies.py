"""Elastic cells against fixed and colocated ones: real runs of one workload, on pinned cores.

Prints one JSON object. Each run is a `gyre train` of ``policies.yaml`` beside this file, with one
cell on each of two cores, so that an idle cell's core is not lent to the other. All runs make the
same number of updates of the same number of groups. Async trains the batch before, one update a
step: its staleness is 1 everywhere, the mean of the 3 updates a step of the others. Run it on an
otherwise idle machine with ``python -m tests.benchmarks.policies``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from cells.ports import free_port
from cells.simulation.compare import policy_for
from cells.simulation.engine import simulate
from cells.simulation.recorded import recorded_times, workload_from_run
from cells.simulation.workload import Workload
from configs.load import load_config
from flows.history import updates_of
from storage.run import Run, open_run

WORKLOAD = Path(__file__).with_name("policies.yaml")
POLICIES = ("elastic", "colocate", "async")
SHORT = ("problems.specrepo.slow_share=0", "rollout.queries=12", "training.steps=1")
"""No tail, and little work in a step."""
RUN_LIMIT_S = 3600
SIMULATED_SEEDS = range(5)


def train(root: Path, policy: str, seed: int, short: bool) -> dict[str, Any]:
    """One run; its seconds, work and costs."""
    settings = [*(SHORT if short else ()), f"cells.policy={policy}", f"seed={seed}"]
    if policy == "async":
        config = load_config(str(WORKLOAD), settings, environment={})
        updates = config.training.updates_per_step
        settings += [
            f"training.steps={config.training.steps * updates}",
            "training.updates_per_step=1",
            f"rollout.queries={config.rollout.queries // updates}",
        ]
    name = f"{policy}-{'short-' if short else ''}{seed}"
    if (root / "runs" / name / "run.json").exists():  # of an earlier call with this root
        return measure(open_run(str(root), name), policy, seed, short)
    command = [sys.executable, "-m", "flows.cli", "train", "--config", str(WORKLOAD)]
    command += ["--name", name, "--root", str(root)]
    for setting in (*settings, f"prefect.port={free_port()}"):
        command += ["--set", setting]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    log = root / f"{name}.log"
    with open(log, "wb") as out:
        subprocess.run(command, env=env, stdout=out, stderr=out, check=True, timeout=RUN_LIMIT_S)
    return measure(open_run(str(root), name), policy, seed, short)


def measure(run: Run, policy: str, seed: int, short: bool) -> dict[str, Any]:
    updates = updates_of(run)
    targets = sum(update.target_tokens for update in updates)
    cells = orjson.loads(run.store.read(run.layout.manifest))["cells"]
    return {
        "run": run.run_id,
        "policy": policy,
        "seed": seed,
        "short": short,
        "seconds": recorded_times(run).wall_s,
        "updates": len(updates),
        "executions": sum(update.executions for update in updates),
        "timed_out": sum(update.timed_out for update in updates),
        "target_tokens": targets,
        "staleness_mean": sum(u.staleness_mean * u.target_tokens for u in updates) / targets,
        "cpu_s": {
            name: {part: cell[part]["cpu_s"] for part in ("rollout", "training")}
            for name, cell in cells.items()
        },
        "mooncake": {name: cell["mooncake"] for name, cell in cells.items()},
        "switches": {name: len(cell["switches"]) for name, cell in cells.items()},
    }


def ratio(runs: list[dict[str, Any]], slower: str) -> float:
    """Median over seeds of how many times longer a policy takes for a trained token."""
    seconds = {(run["policy"], run["seed"]): run["seconds"] / run["target_tokens"] for run in runs}
    seeds = sorted({seed for _, seed in seconds})
    return median(seconds[slower, seed] / seconds["elastic", seed] for seed in seeds)


def simulated(workload: Workload) -> dict[str, float]:
    """The same ratios in virtual time."""
    found: dict[str, float] = {}
    for slower in POLICIES[1:]:
        theirs = workload
        if slower == "async":  # one update a step, as in the real runs
            batch = workload.batch.model_copy(update={"updates_per_burst": 1})
            theirs = workload.model_copy(update={"batch": batch})
        found[f"elastic_over_{slower}"] = median(
            simulate(theirs, policy_for(theirs, slower), seed).seconds
            / simulate(workload, policy_for(workload, "elastic"), seed).seconds
            for seed in SIMULATED_SEEDS
        )
    return found


def every_run(root: Path, seeds: int) -> Iterator[dict[str, Any]]:
    """Policies take turns, so that what else the machine does meets all of them."""
    for seed in range(1, seeds + 1):
        for policy in POLICIES:
            yield train(root, policy, seed, short=False)
    for policy in POLICIES:
        yield train(root, policy, 1, short=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each policy")
    parser.add_argument(
        "--root",
        type=Path,
        help="keep the runs in this folder; those that are whole there are not made again",
    )
    given = parser.parse_args()
    root = given.root or Path(tempfile.mkdtemp(prefix="gyre-policies-"))
    root.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for run in every_run(root, given.seeds):
        print(json.dumps(run), file=sys.stderr, flush=True)
        runs.append(run)
    long = [run for run in runs if not run["short"]]
    short = [run for run in runs if run["short"]]
    real = {f"elastic_over_{slower}": ratio(long, slower) for slower in POLICIES[1:]}
    virtual = simulated(workload_from_run(open_run(str(root), "colocate-1")))
    report = {
        **real,
        "simulated": virtual,
        "share_of_simulated_gain": {
            name: (real[name] - 1) / (virtual[name] - 1) if virtual[name] > 1 else None
            for name in real
        },
        "short_tasks": {f"elastic_over_{slower}": ratio(short, slower) for slower in POLICIES[1:]},
        "runs": runs,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
