"""Journals: what ``append`` has answered for is read back, what it has not is left out."""

from __future__ import annotations

import io
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.journal import Journal, append_line, read_journal, read_lines
from storage.objects import StorageError, Store

_lines = st.lists(
    st.lists(st.binary(max_size=60).map(lambda line: line.replace(b"\n", b""))), max_size=6
)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store(tmp_path)
    return Store(f"memory://{uuid.uuid4().hex}")


@given(batches=_lines, url=st.sampled_from(["folder", "memory://"]))
def test_lines_come_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[bytes]], url: str
) -> None:
    root = tmp_path_factory.getbasetemp() if url == "folder" else url
    store, prefix = Store(root), f"journal-{uuid.uuid4().hex}"
    for batch in batches:  # a writer for each: a restart between
        journal = Journal(store, prefix)
        journal.append(batch[:1])
        journal.append(batch[1:])
        journal.close()
    assert read_journal(store, prefix) == [line for batch in batches for line in batch]


def test_a_torn_last_line_is_left_out_and_never_continued(tmp_path: Path) -> None:
    store = Store(tmp_path)
    Journal(store, "j").append([b"one"])
    path = store.local_path("j/00000000.jsonl")
    with open(path, "ab") as file:
        file.write(b"tor")
    journal = Journal(store, "j", fsync=True)
    journal.append([b"two"])
    assert read_journal(store, "j") == [b"one", b"two"]


def test_a_killed_writer_loses_nothing_that_it_was_answered_for(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from storage.journal import Journal\n"
        "from storage.objects import Store\n"
        "journal = Journal(Store(sys.argv[1]), 'j')\n"
        "for number in range(50):\n"
        "    journal.append([b'line %d' % number])\n"
        "print('answered', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == -9 and done.stdout == b"answered\n"
    assert read_journal(Store(tmp_path), "j") == [b"line %d" % number for number in range(50)]


def test_two_writers_of_a_folder_never_share_a_segment(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = Journal(store, "j"), Journal(store, "j")
    first.append([b"a"])
    second.append([b"b"])
    first.append([b"c"])
    assert sorted(read_journal(store, "j")) == [b"a", b"b", b"c"]
    assert len(store.children("j")) == 2


class _FullDisk(io.RawIOBase):
    """Takes three bytes a write, and refuses after ``room`` of them."""

    def __init__(self, room: int) -> None:
        self.taken = b""
        self._room = room

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        if len(self.taken) >= self._room:
            raise OSError(28, "No space left on device")
        self.taken += bytes(data[:3])
        return min(3, len(data))


def test_a_short_write_is_finished_and_a_failed_one_ends_its_segment(tmp_path: Path) -> None:
    store = Store(tmp_path)
    journal = Journal(store, "j")
    journal.append([b"one"])
    short = _FullDisk(room=1000)
    journal._file, real = short, journal._file  # type: ignore[assignment]
    journal.append([b"a longer line"])
    assert short.taken == b"a longer line\n"
    journal._file = _FullDisk(room=6)  # type: ignore[assignment]
    with pytest.raises(StorageError, match="No space left"):
        journal.append([b"another line"])
    journal.append([b"two"])
    assert store.children("j") == ["00000000.jsonl", "00000001.jsonl"]
    assert read_journal(store, "j") == [b"one", b"two"]
    assert real is not None
    real.close()


def test_nothing_to_write_makes_no_segment(store: Store) -> None:
    journal = Journal(store, "j")
    journal.append([])
    journal.close()
    assert store.children("j") == []


def test_a_growing_object(store: Store) -> None:
    assert read_lines(store, "metrics.jsonl") == []
    append_line(store, "metrics.jsonl", b"one")
    append_line(store, "metrics.jsonl", b"two")
    assert read_lines(store, "metrics.jsonl") == [b"one", b"two"]


@pytest.mark.parametrize("torn", [b"tor", b"t" * 200_000])
def test_a_growing_object_drops_what_a_killed_writer_left(tmp_path: Path, torn: bytes) -> None:
    store = Store(tmp_path)
    append_line(store, "m", b"one")
    path = store.local_path("m")
    with open(path, "ab") as file:
        file.write(torn)
    append_line(store, "m", b"two")
    assert read_lines(store, "m") == [b"one", b"two"]
    path.write_bytes(torn)
    append_line(store, "m", b"three")
    assert path.read_bytes() == b"three\n"
