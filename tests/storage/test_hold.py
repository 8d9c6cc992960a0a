"""Locks on runs and policies: for as long as their holder lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from storage.errors import StorageError
from storage.hold import HeldError, alone, hold_run
from storage.objects import Store
from storage.run import Run
from tests.conftest import make_run

_HOLDER = """
import sys
from storage.hold import hold_run
from storage.layout import RunLayout
from storage.objects import Store
hold_run(Store(sys.argv[1]), RunLayout(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def start_holder(run: Run) -> subprocess.Popen[str]:
    """A process that holds the run until it is killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, run.store.url, run.run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_held_run_can_not_be_had_alone_until_its_holder_dies(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first, second = start_holder(run), start_holder(run)
    for holder in (first, second):
        with pytest.raises(HeldError, match="lock"), alone(run.store, run.layout.lock):
            pass
        holder.kill()
        holder.communicate(timeout=30)
    with alone(run.store, run.layout.lock):
        pass


def test_a_run_that_was_deleted_while_we_waited_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with alone(run.store, run.layout.lock):
        run.store.delete(run.layout.prefix)
    with pytest.raises(StorageError, match="was deleted"):
        hold_run(run.store, run.layout)
    assert run.store.children("runs") == [], "asking leaves nothing"


def test_a_lock_on_a_deleted_file_is_taken_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with alone(store, "lock"):
        store.delete("lock")
        # Another file from here on: the first lock guards nothing any more.
        with alone(store, "lock"), pytest.raises(HeldError), alone(store, "lock"):
            pass


def test_locks_of_a_store_without_files_lie_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store, other = Store("memory://hold/root"), Store("memory://hold/other")
    with alone(store, "lock"):
        with pytest.raises(HeldError), alone(store, "lock"):
            pass
        with alone(other, "lock"):
            assert store.keys("") == []
