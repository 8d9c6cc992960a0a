"""Policies in storage: whole or not there, also with two that make the same one at once."""

from __future__ import annotations

import hashlib
import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from configs import load_config
from storage.objects import Store
from tasks.warm_start import build
from tasks.warm_start.build import build_policy, policy_key
from tasks.warm_start.policies import (
    MANIFEST,
    FirstPolicy,
    PolicyError,
    PolicyManifest,
    first_policy,
    keep_policy,
    only_maker,
    remember_policy,
)
from tests.conftest import make_run

KEY = "policies/one"
SIZE = 200_000


def folder_of(tmp_path: Path, letter: str) -> Path:
    folder = tmp_path / f"folder-{letter}"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(letter * SIZE)
    return folder


def letters(store: Store, key: str) -> set[str]:
    """Every letter in the files of a policy, which are seen to be as its manifest says."""
    manifest = store.read_record(f"{key}/{MANIFEST}", PolicyManifest)
    found: set[str] = set()
    for name, digest in manifest.files.items():
        data = store.read(f"{key}/{name}")
        assert hashlib.sha256(data).hexdigest() == digest
        found |= set(data.decode())
    return found


def _keep(root: str, folder: str, barrier: Barrier, rounds: int) -> None:
    store = Store(root)
    for number in range(rounds):
        barrier.wait(60)
        keep_policy(store, f"{KEY}-{number}", Path(folder), "a race")


def test_of_two_writers_at_once_one_is_kept_whole(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, rounds = context.Barrier(2), 15
    store = Store(tmp_path / "root")
    racers = [
        context.Process(
            target=_keep, args=(store.url, str(folder_of(tmp_path, letter)), barrier, rounds)
        )
        for letter in "ab"
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(120)
        assert racer.exitcode == 0
    for number in range(rounds):
        assert len(letters(store, f"{KEY}-{number}")) == 1, "the files of two are mixed"


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path / "root")
    store.write(f"{KEY}/model.safetensors", b"half")
    store.write(f"{KEY}/strange.json", b"of another")
    keep_policy(store, KEY, folder_of(tmp_path, "a"), "")
    assert letters(store, KEY) == {"a"}
    assert not store.exists(f"{KEY}/strange.json")


def test_who_comes_first_is_kept_on_any_store(tmp_path: Path) -> None:
    for store in (Store(tmp_path / "root"), Store("memory://kept/root")):
        keep_policy(store, KEY, folder_of(tmp_path, f"{store.is_local:d}"), "")
        keep_policy(store, KEY, folder_of(tmp_path, f"{store.is_local + 2:d}"), "")
        assert letters(store, KEY) == {f"{store.is_local:d}"}


def test_the_second_maker_waits_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config, told = Store(tmp_path / "root"), load_config(environment={}), list[str]()
    key = policy_key(config)
    made: list[str] = []

    def make(store: Store, key: str, *_: object) -> None:
        # What a second maker would meet while the first one is at work.
        refused = pytest.raises(PolicyError, match=r"making.*warm_start\.limit_s")
        with refused, only_maker(store, key, 0):
            made.append("by two")
        keep_policy(store, key, folder_of(tmp_path, "a"), "")
        made.append("once")

    monkeypatch.setattr(build, "_make", make)
    assert build_policy(store, config, told.append) == key
    assert build_policy(store, config, told.append) == key
    assert made == ["once"]


def test_a_maker_that_waited_finds_what_the_first_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config, told = Store(tmp_path / "root"), load_config(environment={}), list[str]()
    key, folder = policy_key(config), folder_of(tmp_path, "a")
    monkeypatch.setattr(build, "_make", None)
    answers = iter([False, True])

    def looked(store: Store, key: str) -> bool:
        """Not there at the first look; when the lock is had, the first maker has made it."""
        return next(answers)

    keep_policy(store, key, folder, "")
    monkeypatch.setattr(build, "has_policy", looked)
    assert build_policy(store, config, told.append) == key
    assert "by another process" in told[-1]


def test_a_run_remembers_its_first_policy(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert first_policy(run) is None
    remember_policy(run, KEY)
    remember_policy(run, "policies/other")
    assert run.store.read_record(run.layout.first_policy, FirstPolicy).key == KEY
    assert first_policy(run) is None, "it is gone"
    keep_policy(run.store, KEY, folder_of(tmp_path, "a"), "")
    assert first_policy(run) == KEY
