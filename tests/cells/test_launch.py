"""Daemons that don't start: one clear error at once, and nothing left of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cells.launch import DaemonSpec, LeaseKeeper, StartError, ensure_daemons, stop_daemons
from cells.process import spawn
from storage.run import Run

LIMIT_S = 60.0

_DAEMON = """
import argparse, asyncio
from cells.daemon import Daemon
from storage.layout import RunLayout
from storage.objects import Store

parser = argparse.ArgumentParser()
for name in ("--root", "--run", "--name"):
    parser.add_argument(name)
given = parser.parse_args()

async def close():
    pass

daemon = Daemon(name=given.name, kind="test", lease_s=60, routes=[], close=close)
asyncio.run(daemon.run(Store(given.root), RunLayout(given.run).host(given.name)))
"""

MODULES = {
    "o1_good": _DAEMON,
    "o1_broken": "raise ValueError('model.path has no weights')",
    "o1_clear": 'import sys; print("x can\'t start: no GPU\\nset cells.device"); sys.exit(1)',
    "o1_second": """
import os, pathlib, signal
mark = pathlib.Path(__file__).with_suffix(".mark")
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    + _DAEMON,
    "o1_hangs": "import time; print('waiting for nobody', flush=True); time.sleep(600)",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{Path.cwd()}")


@pytest.fixture
def keeper() -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(60)
    yield keeper
    keeper.close()


def spec(module: str, limit_s: float = LIMIT_S) -> DaemonSpec:
    return DaemonSpec(module.removeprefix("o1_"), module, (), limit_s)


def left(run: Run) -> list[str]:
    """Command lines of living processes of the run."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if run.run_id in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def start(run: Run, keeper: LeaseKeeper, *specs: DaemonSpec) -> str:
    """The text of the error that starting them gives."""
    with pytest.raises(StartError) as caught:
        ensure_daemons(run.store, run.layout, specs, keeper, lambda line: None)
    assert left(run) == []
    return str(caught.value)


def test_the_cause_is_told_and_the_others_are_ended(run_store: Run, keeper: LeaseKeeper) -> None:
    text = start(run_store, keeper, spec("o1_good"), spec("o1_broken"))
    log = run_store.store.local_path(run_store.layout.log("broken"))
    assert text == (
        f"broken ended with exit code 1: ValueError: model.path has no weights\nlog: {log}"
    )


def test_a_failure_is_told_before_a_slower_one_is_ready(
    run_store: Run, keeper: LeaseKeeper
) -> None:
    # Were the first waited for, this test would run into its own limit of time.
    text = start(run_store, keeper, spec("o1_hangs", 3600), spec("o1_clear"))
    assert text.startswith("clear ended with exit code 1: no GPU\nset cells.device\nlog: ")


def test_one_that_never_registers_is_told_with_its_last_words(
    run_store: Run, keeper: LeaseKeeper
) -> None:
    text = start(run_store, keeper, spec("o1_hangs", 3))
    assert text.startswith("hangs is not ready after 3 s; it said last: waiting for nobody\nlog: ")


def test_an_earlier_start_in_the_same_log_is_not_taken_for_this_one(
    run_store: Run, keeper: LeaseKeeper
) -> None:
    log = run_store.store.local_path(run_store.layout.log("broken"))
    log.parent.mkdir(parents=True)
    log.write_text("Traceback (most recent call last):\nOSError: of last week\n")
    assert "of last week" not in start(run_store, keeper, spec("o1_broken"))


def test_one_that_is_killed_while_it_starts_is_started_once_more(
    run_store: Run, keeper: LeaseKeeper
) -> None:
    told: list[str] = []
    run = run_store
    found = ensure_daemons(run.store, run.layout, [spec("o1_second")], keeper, told.append)
    assert told[0].startswith("second was killed (SIGKILL)"), told
    assert told[0].endswith("\nsecond is started once more")
    stop_daemons([found["second"]], 15)
    assert left(run) == []


def test_daemons_are_started_found_again_and_ended(run_store: Run, keeper: LeaseKeeper) -> None:
    told: list[str] = []
    run = run_store
    first = ensure_daemons(run.store, run.layout, [spec("o1_good")], keeper, told.append)
    again = ensure_daemons(run.store, run.layout, [spec("o1_good")], keeper, told.append)
    assert again["good"].registration == first["good"].registration
    assert "adopted" in told[-1]
    stop_daemons([first["good"]], 15)
    assert left(run) == []


def test_a_daemon_elsewhere_is_waited_for_and_adopted(
    run_store: Run, keeper: LeaseKeeper, tmp_path: Path
) -> None:
    away = replace(spec("o1_good"), elsewhere="a command")
    argv = [sys.executable, "-m", "o1_good", "--root", run_store.store.url]
    argv += ["--run", run_store.run_id, "--name", away.name]
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        if "waiting" in line:  # it comes when the launcher looks for it already
            started.append(spawn(argv, env=os.environ, log=tmp_path / "away.log"))

    started: list[subprocess.Popen[bytes]] = []
    clients = ensure_daemons(run_store.store, run_store.layout, [away], keeper, say)
    assert clients["good"].registration.pid == started[0].pid
    assert len(started) == 1, told
    stop_daemons(list(clients.values()), 10)
    assert started[0].wait(10) == 0


def test_one_that_never_comes_from_elsewhere_is_told_with_its_command(
    run_store: Run, keeper: LeaseKeeper
) -> None:
    away = DaemonSpec("cell-b", "cells.host", (), 0.3, elsewhere="gyre host my-run b")
    assert "run `gyre host my-run b` on its machine" in start(run_store, keeper, away)
