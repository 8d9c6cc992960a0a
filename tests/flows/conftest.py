"""Real runs from the command line, and servers with runs of stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import orjson
import pytest

from cells.ports import free_port
from storage.run import Run, open_run
from tests.flows.orchestrated import MARK, Orchestrated, logs, marked_processes, serve

if TYPE_CHECKING:
    from tests.flows.operated import Operated

RUN_LIMIT_S = 900


@dataclass(frozen=True)
class FinishedRun:
    """A run that `gyre train` has finished, and what it printed."""

    run: Run
    output: str
    left: tuple[str, ...]
    """Command lines of processes that it left behind."""


def run_smoke(root: Path) -> FinishedRun:
    """`gyre train --config smoke` under colocate, where every cell trains too, to its end."""
    options = ("--config", "smoke", "--set", "cells.policy=colocate")
    command = start_gyre(root, "train", "--name", "smoke-run", *options)
    output = finish(command, root)
    left = tuple(line for _, line in marked_processes(root))
    if command.returncode:
        pytest.fail(f"gyre train ended with {command.returncode}:\n{output[-6000:]}\n{logs(root)}")
    return FinishedRun(open_run(str(root), "smoke-run"), output, left)


@pytest.fixture(scope="session")
def orchestrated(
    tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Orchestrated]:
    """A Prefect server with a worker, whose runs have stand-ins for engines and replicas."""
    root = tmp_path_factory.mktemp("orchestrated")
    (root / "evaluators").mkdir()
    served = serve(root, free_port())
    assert served.stdin is not None and served.stdout is not None
    try:
        line = served.stdout.readline()
        assert line, logs(root)
        found = orjson.loads(line)
        with httpx.Client(base_url=found["api"], trust_env=False, timeout=60) as api:
            yield Orchestrated(
                api=api,
                url=found["ui"],
                root=root,
                deployments=found["deployments"],
                policy=tiny_policy,
            )
    finally:
        served.stdin.close()
        served.wait(timeout=120)
    assert marked_processes(root) == []


@pytest.fixture(scope="session")
def operated(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """`gyre serve`, whose runs have stand-ins for engines and replicas."""
    from tests.flows.operated import gyre_served  # only now: it brings prefect

    with gyre_served(tmp_path_factory.mktemp("operated"), tiny_policy) as site:
        yield site


def start_gyre(
    root: Path, command: str, *arguments: str, storage: str = "", port: int = 0
) -> subprocess.Popen[str]:
    """Start a command in ``root``, which is its storage too unless another is given; with a Prefect
    server of its own unless the port of one is given."""
    port = port or free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"GYRE_SET_PREFECT__PORT": str(port), MARK: str(root)}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", command, *arguments, "--root", storage or str(root)],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def finish(command: subprocess.Popen[str], root: Path) -> str:
    """What the command printed until its end; it is interrupted when it takes too long."""
    try:
        output, _ = command.communicate(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGINT)
        output, _ = command.communicate(timeout=90)
        pytest.fail(f"still running after {RUN_LIMIT_S} s:\n{output[-6000:]}\n{logs(root)}")
    return output
