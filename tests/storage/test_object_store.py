"""Storage on s3, with moto's server: objects, records and journals."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from s3fs import S3FileSystem

from storage.copies import local_copy, send_copy
from storage.errors import MissingObjectError, StorageError
from storage.journal import Journal, JournalTail, append_line, read_journal, read_lines
from storage.objects import Store
from storage.records import StepDone


@pytest.fixture
def store(s3: str, request: pytest.FixtureRequest) -> Store:
    return Store(f"{s3}/{request.node.name}")


def test_objects_are_there_whole_or_not_at_all(store: Store) -> None:
    with pytest.raises(MissingObjectError):
        store.read("runs/a/one")
    store.write("runs/a/one", b"first")
    store.write("runs/a/one", b"second")
    assert store.read("runs/a/one") == b"second"
    assert not store.write_once("runs/a/one", b"third")
    assert store.write_once("runs/a/two", b"2")
    assert store.keys("runs") == ["runs/a/one", "runs/a/two"]
    assert store.children("runs") == ["a"] and store.children("runs/a") == ["one", "two"]
    assert store.read_from("runs/a/one", 3) == b"ond" and store.read_from("none", 0) == b""
    assert {entry.key: entry.size for entry in store.entries("runs")}["runs/a/one"] == 6
    changed = store.written_at("runs/a/one")
    assert changed is not None and changed > 1e9
    store.delete("runs/a")
    assert store.keys("runs") == [] and not store.exists("runs/a/one")


def test_a_record_comes_back_as_it_was(store: Store) -> None:
    done = StepDone(step=3, policy_version=16, seconds=1.5)
    assert store.write_record_once("done.json", done)
    assert not store.write_record_once("done.json", done)
    assert store.read_record("done.json", StepDone) == done


def test_journals_go_on_after_another_writer(store: Store) -> None:
    for part in (b"one", b"two"):
        journal = Journal(store, "calls")
        journal.append([part])
        journal.close()
    assert read_journal(store, "calls") == [b"one", b"two"]
    tail = JournalTail(store, "calls")
    assert tail.read() == [b"one", b"two"] and tail.read() == []
    append_line(store, "metrics.jsonl", b"{}")
    append_line(store, "metrics.jsonl", b"[]")
    assert read_lines(store, "metrics.jsonl") == [b"{}", b"[]"]


def test_of_many_writers_at_once_one_succeeds(store: Store) -> None:
    """What epochs are taken with: the look before the write is not what tells them apart."""
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda number: store.write_once("one", b"%d" % number), range(8)))
    assert done.count(True) == 1
    assert store.read("one") == b"%d" % done.index(True)


def test_another_process_changes_what_this_one_has_listed(store: Store) -> None:
    store.write("folder/old", b"1")
    assert store.children("folder") == ["old"]
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    boto3.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/folder/new", Body=b"2")
    assert store.exists("folder/new") and store.read("folder/new") == b"2"


def test_what_programs_load_is_fetched_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingObjectError):
        local_copy(store, "policies/x")
    made = store.local_file("policies/x")
    (made / "deep").mkdir(parents=True)
    (made / "config.json").write_bytes(b"{}")
    (made / "deep" / "weights").write_bytes(b"w" * 100_000)
    send_copy(store, "policies/x")
    assert store.keys("policies") == ["policies/x/config.json", "policies/x/deep/weights"]
    shutil.rmtree(tmp_path / "gyre")
    assert local_copy(store, "policies/x/config.json").read_bytes() == b"{}"
    folder = local_copy(store, "policies/x", without="weights")
    assert folder == made and not (folder / "deep").exists()
    assert local_copy(store, "policies/x") == folder
    assert (folder / "deep" / "weights").read_bytes() == b"w" * 100_000
    inode = (folder / "config.json").stat().st_ino
    assert (local_copy(store, "policies/x") / "config.json").stat().st_ino == inode
    (folder / "deep" / "weights").write_bytes(b"half")  # as a full disk leaves it
    assert (local_copy(store, "policies/x") / "deep" / "weights").stat().st_size == 100_000
    store.delete("policies/x")
    assert not folder.exists()


def test_credentials_that_are_missing_are_said(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    S3FileSystem.clear_instance_cache()  # of one that has them
    try:
        store = Store(f"{s3}/none")
        for attempt in (lambda: store.read("one"), lambda: store.children("runs")):
            with pytest.raises(StorageError, match="credentials"):
                attempt()
    finally:
        S3FileSystem.clear_instance_cache()


def test_a_bucket_that_is_not_there_is_named(s3: str) -> None:
    with pytest.raises(StorageError, match="no-such-bucket"):
        Store("s3://no-such-bucket/x").write("one", b"")
