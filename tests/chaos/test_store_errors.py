"""An s3 server that fails: what passes is not seen, what stays is an error with the key."""

from __future__ import annotations

import pytest
from s3fs import S3FileSystem

from storage.errors import DiskFullError, StorageError
from storage.journal import Journal, read_journal
from storage.objects import Store
from tests.chaos.failing_store import Failing


@pytest.mark.parametrize("status", ["503 Slow Down", "500 Internal Server Error"])
def test_errors_that_pass_are_not_seen(failing: Failing, status: str) -> None:
    store = Store(f"s3://failing/{failing.root}")
    failing.failures, failing.status = 2, status
    store.write("one", b"first")
    assert store.read("one") == b"first"
    journal = Journal(store, "calls")
    journal.append([b"a"])
    journal.close()
    assert read_journal(store, "calls") == [b"a"]
    assert failing.tries[("PUT", f"/failing/{failing.root}/one")] == 3, (
        "each was tried again, and no more"
    )


def test_an_error_that_stays_has_the_key_and_leaves_nothing(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    store = Store(f"s3://failing/{failing.root}")
    failing.failures = 1 << 30
    with pytest.raises(StorageError, match=f"failing/{failing.root}/one"):
        store.write("one", b"first")
    failing.failures = 0
    assert not store.exists("one")


def test_an_answer_that_is_lost_repeats_no_line(failing: Failing) -> None:
    """The first try took effect, and nobody heard of it: the second finds it there."""
    store = Store(f"s3://failing/{failing.root}")
    failing.failures, failing.status, failing.loses_answers = 1, "500 Internal Server Error", True
    journal = Journal(store, "ledger")
    for line in (b"one", b"two"):
        journal.append([line])
    journal.close()
    assert read_journal(store, "ledger") == [b"one", b"two"]
    assert store.write_once("verdict", b"0.5"), "it is there, and is what was to be written"
    assert not store.write_once("verdict", b"0.75")


@pytest.mark.parametrize(
    ("status", "code"),
    [("507 Insufficient Storage", "XMinioStorageFull"), ("403 Forbidden", "QuotaExceeded")],
)
def test_a_full_store_is_told_at_once_and_gone_on_with(
    failing: Failing, status: str, code: str
) -> None:
    store = Store(f"s3://failing/{failing.root}")
    store.write("old", b"old")
    journal = Journal(store, "ledger")
    journal.append([b"first"])
    failing.failures, failing.status, failing.code = 1 << 30, status, code
    told = f"failing/{failing.root}/new.*the store is full \\({code}\\)"
    with pytest.raises(DiskFullError, match=told):
        store.write("new", b"new")
    with pytest.raises(DiskFullError, match="gyre gc --dry-run"):
        journal.append([b"second"])
    assert failing.tries[("PUT", f"/failing/{failing.root}/new")] == 1, "asking again is no use"
    failing.failures = 0
    assert store.read("old") == b"old" and not store.exists("new")
    journal.append([b"second"])
    journal.close()
    assert read_journal(store, "ledger") == [b"first", b"second"]
