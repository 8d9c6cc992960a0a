"""Reading what another process goes on writing."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.journal import Journal, JournalTail, LineTail, append_line
from storage.objects import Store


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store(tmp_path)
    return Store(f"memory://{uuid.uuid4().hex}")


_STEPS = st.lists(st.sampled_from(["append", "restart", "read"]), max_size=30)


@given(steps=_STEPS, url=st.sampled_from(["folder", "memory://"]))
def test_each_line_of_a_journal_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], url: str
) -> None:
    store = Store(tmp_path_factory.getbasetemp() if url == "folder" else url)
    prefix = f"tail-{uuid.uuid4().hex}"
    tail, journal = JournalTail(store, prefix), Journal(store, prefix)
    written: list[bytes] = []
    read: list[bytes] = []
    for number, step in enumerate(steps):
        if step == "append":
            written.append(str(number).encode())
            journal.append(written[-1:])
        elif step == "restart":
            journal.close()
            journal = Journal(store, prefix)
        else:
            read += tail.read()
            assert read == written
    journal.close()
    assert read + tail.read() == written


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tail = LineTail(store, "lines")
    assert tail.read() == []
    path = store.local_path("lines")
    path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    path.write_bytes(b"one\ntwo\nthree\n")
    assert tail.read() == [b"two", b"three"]
    assert tail.read() == []


def test_a_growing_object_is_read_from_where_one_was(store: Store) -> None:
    append_line(store, "m", b"one")
    assert store.read_from("m", 0) == b"one\n"
    append_line(store, "m", b"two")
    assert store.read_from("m", 4) == b"two\n"
    assert store.read_from("m", 8) == store.read_from("m", 99) == b""
    assert store.read_from("nothing", 0) == b""


def test_when_an_object_was_written(store: Store) -> None:
    began = time.time()
    store.write("a/b", b"x")
    written = store.written_at("a/b")
    assert written is not None and began - 2 <= written <= time.time() + 2
    assert store.written_at("nothing") is None
