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

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from cells.ports import free_port
from cells.simulation.compare import policy_for
from cells.simulation.engine import simulate
from cells.simulation.recorded import recorded_times
from cells.simulation.replay import replayed
from cells.simulation.workload import Workload
from configs.load import load_config
from flows.history import updates_of
from flows.server import orchestration
from storage.objects import Store
from storage.run import Run, open_run
from tasks.warm_start.build import build_policy
from tests.benchmarks.quotas import held_to
from tests.benchmarks.wide_policy import widen

WORKLOAD = Path(__file__).with_name("policies.yaml")
MLP_FEATURES = 6144
"""Of the policy: training it takes about as long as rolling out with it."""
POLICIES = ("elastic", "colocate", "async")
SHORT = ("problems.specrepo.slow_share=0",)
"""No tail."""
QUOTA_CORES = 0.5
FOUR_CELLS = (
    "cells.cells=[{name: a, core: true, cpus: [0]}, {name: b, cpus: [1]}, {name: c, cpus: [0]}, "
    "{name: d, cpus: [1]}]",
    "cells.executions_per_cell=12",
    "cells.training_cells=2",
)
RUN_LIMIT_S = 1800


@dataclass(frozen=True)
class Series:
    """Where the runs of this call are, what they start from, and how their cells are held."""

    root: Path
    policy: Path
    quotas: bool
    changes: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Beyond the workload's."""
        model = ("model.source=hf_directory", f"model.path={self.policy}")
        return (*model, *(FOUR_CELLS if self.quotas else ()), *self.changes)

    def recorded(self, policy: str, seed: int) -> Run:
        """A run with the tail."""
        return open_run(str(self.root), f"{policy}-{seed}")


def train(series: Series, policy: str, seed: int, short: bool) -> dict[str, Any]:
    """One run; its seconds, work and costs."""
    chosen = (*series.settings, *(SHORT if short else ()), f"cells.policy={policy}", f"seed={seed}")
    config = load_config(str(WORKLOAD), list(chosen), environment={})
    if policy == "async":
        updates = config.training.updates_per_step
        chosen += (
            f"training.steps={config.training.steps * updates}",
            "training.updates_per_step=1",
            f"rollout.queries={config.rollout.queries // updates}",
        )
    root, name = series.root, f"{policy}-{'short-' if short else ''}{seed}"
    if (root / "runs" / name / "run.json").exists():  # of an earlier call with this root
        return measure(open_run(str(root), name), policy, seed, short)
    command = [sys.executable, "-m", "flows.cli", "train", "--config", str(WORKLOAD)]
    command += ["--name", name, "--root", str(root)]
    for setting in chosen:
        command += ["--set", setting]
    with open(root / f"{name}.log", "wb") as out, ExitStack() as held:
        if series.quotas:
            cells = tuple(cell.name for cell in config.cells.cells)
            held.enter_context(held_to(QUOTA_CORES, name, cells))
        subprocess.run(command, stdout=out, stderr=out, check=True, timeout=RUN_LIMIT_S)
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


def first_policy(root: Path) -> Path:
    """What all runs start from: the quickstart's, with wide MLPs."""
    store = Store(str(root))
    target = root / "policy"
    if not (target / "config.json").exists():
        config = load_config("quickstart", environment={})
        key = build_policy(store, config, lambda line: print(line, file=sys.stderr))
        widen(store.local_path(key), target, MLP_FEATURES)
    return target


def made(series: Series, runs: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them, on one Prefect server, which each finds by PREFECT_API_URL."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    config = load_config(str(WORKLOAD), [*series.settings, f"prefect.port={free_port()}"])
    data = series.root / "prefect"
    found: list[dict[str, Any]] = []
    with orchestration(config.prefect, data, lambda line: print(line, file=sys.stderr)):
        for run in runs:
            print(json.dumps(run), file=sys.stderr, flush=True)
            found.append(run)
    return found


def asked(about: str | None, *changes: str) -> tuple[Series, int]:
    """What the command line says: the series, and how many seeds."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each policy")
    parser.add_argument(
        "--root",
        type=Path,
        help="keep the runs in this folder; those that are whole there are not made again",
    )
    parser.add_argument("--quotas", action="store_true", help="four cells of half a core each")
    given = parser.parse_args()
    root = (given.root or Path(tempfile.mkdtemp(prefix="gyre-policies-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    return Series(root, first_policy(root), given.quotas, changes), given.seeds


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
