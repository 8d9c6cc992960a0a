"""`gyre serve` as a person runs it; with stand-ins for engines and replicas unless it is told
otherwise."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from cells.ports import free_port
from flows.deploy import DEPLOYED
from tests.flows.orchestrated import LIMIT_S, Orchestrated, environment, logs, marked_processes

_END_LIMIT_S = 120


@dataclass(frozen=True)
class Operated(Orchestrated):
    """What is served, and where a reader would look."""

    pages: str
    """Address of the pages of runs."""


@contextmanager
def gyre_served(
    root: Path, policy: Path, *, storage: str = "", env: dict[str, str] | None = None
) -> Iterator[Operated]:
    """Start `gyre serve` in a new folder, and end it; nothing of it may be left.

    Args:
        storage: its storage; ``root`` when empty.
        env: its environment, which marks its processes; that of runs with stand-ins without it.
    """
    (root / "evaluators").mkdir()
    port = free_port()
    argv = [sys.executable, "-m", "flows.cli", "serve", "--port", "0"]
    argv += ["--root", storage or str(root)]
    argv += ["--set", f"prefect.port={port}", "--set", f"prefect.start_limit_s={LIMIT_S}"]
    with open(root / "serve.log", "ab") as log:
        served = subprocess.Popen(
            argv,
            env=environment(root) if env is None else env,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            text=True,
        )
    try:
        pages = _until_ready(served, root)
        ui = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=f"{ui}/api", trust_env=False, timeout=60) as api:
            ids = {
                name: str(api.get(f"/deployments/name/{name}/{name}").json()["id"])
                for name in DEPLOYED
            }
            yield Operated(api=api, url=ui, root=root, deployments=ids, policy=policy, pages=pages)
    finally:
        served.send_signal(signal.SIGTERM)  # a suite in the background ignores SIGINT
        with suppress(subprocess.TimeoutExpired):
            served.wait(timeout=_END_LIMIT_S)
        served.kill()
    assert served.returncode == 0, logs(root)
    assert marked_processes(root) == []


def _until_ready(served: subprocess.Popen[str], root: Path) -> str:
    """Read what it prints until it is ready; the address of its pages."""
    assert served.stdout is not None
    pages = ""
    for line in served.stdout:
        if found := re.search(r"pages of runs: (\S+)", line):
            pages = found.group(1)
        if line.startswith("ready"):
            return pages
    raise AssertionError(logs(root))
