"""Objects are visible whole or not at all, on a local folder and on any other store."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import uuid
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.objects import MissingObjectError, StorageError, Store
from storage.records import StepPlan


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store(tmp_path)
    return Store(f"memory://{uuid.uuid4().hex}/root")


def test_what_is_written_is_read(store: Store) -> None:
    store.write("a/b/object", b"one")
    store.write("a/b/object", b"two")
    assert store.read("a/b/object") == b"two"
    assert store.exists("a/b/object")
    assert not store.exists("a/b")


def test_nothing_there_is_said_by_key(store: Store) -> None:
    store.write("a/object", b"")
    for key in ("b", "a/other"):
        with pytest.raises(MissingObjectError, match=key):
            store.read(key)
    with pytest.raises(StorageError):
        store.read("a")


def test_listings(store: Store) -> None:
    for key in ("a/b/2", "a/b/1", "a/c", "ab/3"):
        store.write(key, b"x")
    assert store.keys("a") == ["a/b/1", "a/b/2", "a/c"]
    assert store.keys("") == ["a/b/1", "a/b/2", "a/c", "ab/3"]
    assert store.children("a") == ["b", "c"]
    assert store.keys("none") == store.children("none") == []
    store.delete("a/b")
    store.delete("a/b")
    assert store.keys("a") == ["a/c"]


def test_write_once_keeps_the_first(store: Store) -> None:
    assert store.write_once("key", b"first")
    assert not store.write_once("key", b"second")
    assert store.read("key") == b"first"
    assert store.children("") == ["key"]


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "/etc/passwd"])
def test_keys_stay_below_the_root(store: Store, key: str) -> None:
    with pytest.raises(StorageError, match="not a key"):
        store.write(key, b"x")


def test_records_of_a_store(store: Store) -> None:
    plan = StepPlan(step=1, policy_version=4, queries=())
    assert store.write_record_once("plan", plan)
    assert not store.write_record_once("plan", StepPlan(step=2, policy_version=4, queries=()))
    assert store.read_record("plan", StepPlan) == plan


def test_only_a_folder_has_paths(tmp_path: Path) -> None:
    assert Store(tmp_path).local_path("a/b") == tmp_path / "a" / "b"
    with pytest.raises(StorageError, match="no path on this machine"):
        Store("memory://x").local_path("a")


@given(data=st.binary(max_size=5000))
def test_any_bytes_survive(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    store = Store(tmp_path_factory.getbasetemp() / "bytes")
    store.write("object", data)
    assert store.read("object") == data


def test_a_refusing_store_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.write("file", b"a file, not a folder")
    with pytest.raises(StorageError, match="can't be written"):
        store.write("file/below", b"x")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (store.write, store.write_once):
        with pytest.raises(StorageError, match="No space left"):
            write("other", b"x")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert store.read("file") == b"a file, not a folder"


def test_readers_see_the_old_or_the_new_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("object", bytes(100_000))
    done = threading.Event()

    def write() -> None:
        for value in range(1, 120):
            store.write("object", bytes([value]) * 100_000)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[int] = []
    while not done.is_set():
        data = store.read("object")
        assert len(data) == 100_000
        assert len(set(data)) == 1
        seen.append(data[0])
        assert store.keys("") == ["object"]
    writer.join()
    assert seen == sorted(seen)


_ROUNDS = 40


def test_of_two_processes_one_writes_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    wins = context.SimpleQueue()
    names = ("one", "two")
    racers = [
        context.Process(target=_race, args=(str(tmp_path), name, barrier, wins)) for name in names
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    won = [number for _ in names for number in wins.get()]
    assert sorted(won) == list(range(_ROUNDS))
    store = Store(tmp_path)
    assert all(
        store.read(f"key-{number}") in {name.encode() * 1000 for name in names} for number in won
    )
    assert len(store.children("")) == _ROUNDS


def _race(root: str, name: str, barrier: Barrier, wins: SimpleQueue[list[int]]) -> None:
    store = Store(root)
    won: list[int] = []
    for number in range(_ROUNDS):
        barrier.wait(30)
        if store.write_once(f"key-{number}", name.encode() * 1000):
            won.append(number)
    wins.put(won)
