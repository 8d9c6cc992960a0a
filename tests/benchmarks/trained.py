"""Runs of ``gyre train`` that a benchmark compares, one after the other: real ones, for hours."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from storage.objects import Store
from storage.run import Run, open_run


def parser(name: str, config: str) -> argparse.ArgumentParser:
    """Options of a benchmark that trains ``config`` with several seeds."""
    options = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{name}")
    options.add_argument("--config", default=config)
    options.add_argument("--seeds", default="1,2,3")
    options.add_argument("--root", default=".gyre")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return options


def trained(given: argparse.Namespace, variant: str, seed: int, settings: Sequence[str]) -> Run:
    """The run of a variant and a seed: trained, resumed, or only read when it has ended.

    Args:
        settings: what makes the variant; those that were given come after them.
    """
    name = f"{given.config}-{variant}-seed-{seed}"
    command = [sys.executable, "-m", "flows.cli", "train", "--root", given.root]
    if Store(given.root).exists(f"runs/{name}/config.yaml"):
        command += ["--resume", name]
    else:
        command += ["--config", given.config, "--seed", str(seed), "--name", name]
        command += [part for setting in (*settings, *given.set) for part in ("--set", setting)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return open_run(given.root, name)
