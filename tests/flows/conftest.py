"""One real run from the command line, shared by all tests that look at what it left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from storage.run import Run, open_run

RUN_LIMIT_S = 900


@dataclass(frozen=True)
class FinishedRun:
    """A run that `gyre train` has finished, and what it printed."""

    run: Run
    output: str
    exit_code: int
    left: tuple[str, ...]
    """Command lines of processes that it left behind."""


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRun]:
    """`gyre train --config smoke`, to its end."""
    root = tmp_path_factory.mktemp("smoke")
    output, exit_code = gyre(
        root, "train", "--config", "smoke", "--name", "smoke-run", "--root", str(root)
    )
    left = tuple(processes_that_mention(str(root)))
    if exit_code:
        pytest.fail(f"gyre train ended with {exit_code}:\n{output[-6000:]}\n{logs(root)}")
    yield FinishedRun(open_run(str(root), "smoke-run"), output, exit_code, left)


def gyre(root: Path, *arguments: str) -> tuple[str, int]:
    """Run the command line with a Prefect server of its own; its output and exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env["GYRE_SET_PREFECT__PORT"] = str(port)
    command = [sys.executable, "-m", "flows.cli", *arguments]
    process = subprocess.Popen(
        command,
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
        pytest.fail(f"{' '.join(arguments)} took over {RUN_LIMIT_S} s:\n{output[-6000:]}")
    return output, process.returncode


def processes_that_mention(text: str) -> Iterator[str]:
    """Command lines of living processes of which an argument holds ``text``."""
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if text in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield line


def logs(root: Path) -> str:
    """The ends of all logs below a storage root."""
    found = []
    for path in sorted(root.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-25:]
        found.append(f"--- {path}\n" + "\n".join(lines))
    return "\n".join(found)
