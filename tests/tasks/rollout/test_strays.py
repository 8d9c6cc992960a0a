"""Processes are found by what they belong to, and the watcher cleans up after its owner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.rollout import strays
from tasks.rollout.strays import end_strays, find_strays

SLEEPER = [sys.executable, "-I", "-S", "-c", "print(flush=True); import time; time.sleep(600)"]


def sleeper(**options: object) -> subprocess.Popen[bytes]:
    process: subprocess.Popen[bytes] = subprocess.Popen(
        SLEEPER,
        stdout=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mine"
    folder.mkdir()
    yield folder
    end_strays(str(folder))


def test_by_working_folder_and_by_environment(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine-not").mkdir()
    inside = sleeper(cwd=folder)
    marked = sleeper(env={"HOME": f"{folder}/home"}, start_new_session=True)
    other = sleeper(cwd=tmp_path / "mine-not", env={"HOME": f"{folder}-not/home"})
    try:
        assert set(find_strays(str(folder))) == {inside.pid, marked.pid}
        assert end_strays(str(folder)) == 2
        assert (inside.wait(20), marked.wait(20)) == (-9, -9)
        assert other.poll() is None
    finally:
        other.kill()
        for process in (inside, marked, other):
            process.communicate()


def test_watcher(folder: Path) -> None:
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", strays.__file__, str(folder)], stdin=subprocess.PIPE
    )
    stray = sleeper(cwd=folder)
    assert watcher.stdin is not None
    watcher.stdin.close()
    assert watcher.wait(60) == 0
    assert stray.wait(20) == -9
    stray.communicate()
    assert not folder.exists()
