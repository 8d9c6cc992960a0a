"""A series of real runs of the workload in ``policies.yaml``, each held to its share of cores.

What ``policies`` and ``carried`` compare: what their command lines ask for, one run, its figures.
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
from typing import Any

import orjson

from cells.ports import free_port
from cells.simulation.recorded import recorded_times
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
