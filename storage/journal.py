"""Append-only logs of lines: a file on a local store, numbered immutable segments elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import BinaryIO

from storage.errors import refused
from storage.objects import Store

_TAIL_BYTES = 1 << 16


class Journal:
    """One writer's log under a prefix. A line is durable against the death of this process when
    ``append`` has returned, and against the machine's when ``fsync`` was asked for.

    Every opening starts a new segment, so that a torn last line of a killed writer is never
    continued.
    """

    def __init__(self, store: Store, prefix: str, *, fsync: bool = False) -> None:
        self._store = store
        self._prefix = prefix
        self._fsync = fsync
        self._lock = threading.Lock()
        self._next = _next_segment(store, prefix)
        self._file: BinaryIO | None = None

    def append(self, lines: Iterable[bytes]) -> None:
        """Write lines (without newlines inside).

        Raises:
            StorageError: the store is full or refuses.
        """
        data = b"".join(line + b"\n" for line in lines)
        if not data:
            return
        with self._lock:
            if not self._store.is_local:
                while not self._store.write_once(self._segment(), data):
                    self._next += 1  # another writer came in between
                self._next += 1
                return
            try:
                if self._file is None:
                    self._file = self._open_segment()
                _write_all(self._file, data)
                if self._fsync:
                    os.fsync(self._file.fileno())
            except OSError as error:
                path = self._store.local_path(self._segment())
                self._end_segment()  # what follows must not continue a torn line
                raise refused(path, error) from error

    def close(self) -> None:
        """End the segment; a later ``append`` opens a new one."""
        with self._lock:
            self._end_segment()

    def _open_segment(self) -> BinaryIO:
        """A file that nobody had before, whatever other writer came in between."""
        while True:
            path = self._store.local_path(self._segment())
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return open(path, "xb", buffering=0)
            except FileExistsError:
                self._next += 1

    def _end_segment(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._next += 1

    def _segment(self) -> str:
        return f"{self._prefix}/{self._next:08d}.jsonl"


def read_journal(store: Store, prefix: str) -> list[bytes]:
    """All whole lines of a journal in order. A torn last line of a segment is left out: its writer
    never got an answer for it."""
    lines: list[bytes] = []
    for key in store.keys(prefix):
        if key.endswith(".jsonl"):
            lines.extend(store.read(key).split(b"\n")[:-1])
    return lines


class JournalTail:
    """Reads a journal that is being written, each line once."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._segment = ""
        self._tail: LineTail | None = None

    def read(self) -> list[bytes]:
        """The whole lines that came since the last call, in order."""
        lines: list[bytes] = []
        for name in self._store.children(self._prefix):
            # The last one of the call before may have grown since, even where it has successors.
            if not name.endswith(".jsonl") or name < self._segment:
                continue
            if name != self._segment or self._tail is None:
                self._segment = name
                self._tail = LineTail(self._store, f"{self._prefix}/{name}")
            lines.extend(self._tail.read())
        return lines


class LineTail:
    """Reads one growing object of lines, each line once."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._offset = 0

    def read(self) -> list[bytes]:
        """The whole lines that came since the last call, in order."""
        data = self._store.read_from(self._key, self._offset)
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return data[:whole].split(b"\n")[:-1]


def append_line(store: Store, key: str, line: bytes) -> None:
    """Add a line to one growing object. Meant for small files with one writer, such as metrics:
    an object store has to write the whole of it again."""
    if not store.is_local:
        old = store.read(key) if store.exists(key) else b""
        store.write(key, old + line + b"\n")
        return
    path = store.local_path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", buffering=0) as file:
            _drop_torn_line(file)
            _write_all(file, line + b"\n")
    except OSError as error:
        raise refused(path, error) from error


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Write all of ``data`` to an unbuffered file; one ``write`` may take only a part.

    Raises:
        OSError: the rest can't be written. A part may have been.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut off what a killed writer left after the last newline, so that nothing continues it."""
    end = file.seek(0, os.SEEK_END)
    kept = end
    while kept:
        start = max(0, kept - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(kept - start).rfind(b"\n")
        if newline >= 0:
            kept = start + newline + 1
            break
        kept = start
    if kept != end:
        file.truncate(kept)


def read_lines(store: Store, key: str) -> list[bytes]:
    """Whole lines of one growing object; none when it is not there."""
    return store.read(key).split(b"\n")[:-1] if store.exists(key) else []


def _next_segment(store: Store, prefix: str) -> int:
    names = [name for name in store.children(prefix) if name.endswith(".jsonl")]
    return int(names[-1].split(".")[0]) + 1 if names else 0
