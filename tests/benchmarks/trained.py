"""Runs of ``gyre train`` that a benchmark compares, one after the other: real ones, for hours."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from configs.load import load_config
from flows.roots import absolute_root
from flows.sweep.share import share_first_step
from storage.objects import Store
from storage.run import Run, create_run, open_run


def parser(name: str, config: str) -> argparse.ArgumentParser:
    """Options of a benchmark that trains ``config`` with several seeds."""
    options = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{name}")
    options.add_argument("--config", default=config)
    options.add_argument("--seeds", default="1,2,3")
    options.add_argument("--root", default=".gyre")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return options


def trained(
    given: argparse.Namespace,
    variant: str,
    seed: int,
    settings: Sequence[str],
    first_step_of: Run | None = None,
) -> Run:
    """The run of a variant and a seed: trained, resumed, or only read when it has ended.

    Args:
        settings: what makes the variant; those that were given come after them.
        first_step_of: a run that differs only in what is done with rollouts: those of its first
            step, and its evaluation of the first policy, are this run's too.
    """
    name = f"{given.config}-{variant}-seed-{seed}"
    root = absolute_root(given.root)
    if not Store(root).exists(f"runs/{name}/config.yaml"):
        overrides = [*settings, *given.set, f"seed={seed}", f"storage.root={root}"]
        run = create_run(root, name, load_config(given.config, overrides))
        if first_step_of is not None:
            share_first_step(first_step_of, run)
    command = [sys.executable, "-m", "flows.cli", "train", "--root", root, "--resume", name]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return open_run(root, name)
