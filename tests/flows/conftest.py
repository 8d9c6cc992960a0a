"""One real run from the command line, shared by all tests that look at what it left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from storage.run import Run, open_run

RUN_LIMIT_S = 900


MARK = "GYRE_TEST_RUN"
"""Environment variable that every process of a run inherits."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that `gyre train` has finished, and what it printed."""

    run: Run
    output: str
    left: tuple[str, ...]
    """Command lines of processes that it left behind."""


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """`gyre train --config smoke`, to its end."""
    root = tmp_path_factory.mktemp("smoke")
    command = start_gyre(root, "train", "--config", "smoke", "--name", "smoke-run")
    output = finish(command, root)
    left = tuple(line for _, line in marked_processes(root))
    if command.returncode:
        pytest.fail(f"gyre train ended with {command.returncode}:\n{output[-6000:]}\n{logs(root)}")
    return FinishedRun(open_run(str(root), "smoke-run"), output, left)


def start_gyre(root: Path, command: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a command with a Prefect server of its own on the storage ``root``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"GYRE_SET_PREFECT__PORT": str(port), MARK: str(root)}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", command, *arguments, "--root", str(root)],
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


def marked_processes(root: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Living processes that a command on ``root`` or its children started."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == str(root):
                yield process, " ".join(process.cmdline())


def logs(root: Path) -> str:
    """The ends of all logs below a storage root."""
    found = []
    for path in sorted(root.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-25:]
        found.append(f"--- {path}\n" + "\n".join(lines))
    return "\n".join(found)
