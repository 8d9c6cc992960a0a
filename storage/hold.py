"""Locks on parts of a storage root, which the kernel lifts when their holder dies.

A locked file keeps ``gyre gc`` from deleting a run that somebody works on, and two runs from making
the same policy at once. For a root on an object store the files lie in this machine's cache: there
a lock holds against processes of this machine, and between machines epochs fence who came first.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from storage.errors import StorageError, refused
from storage.layout import RunLayout
from storage.objects import Store

_POLL_S = 0.2
_HOLD_LIMIT_S = 30.0

_held: list[BinaryIO] = []
"""Open as long as this process lives."""


class HeldError(StorageError):
    """Somebody else holds the lock."""


def hold_run(store: Store, layout: RunLayout) -> None:
    """Keep a run from being deleted as long as this process lives.

    Raises:
        StorageError: it was deleted meanwhile.
    """
    there = store.exists(layout.config)
    if there:
        _held.append(_locked(store, layout.lock, fcntl.LOCK_SH, _HOLD_LIMIT_S))
        there = store.exists(layout.config)
    if not there:
        raise StorageError(f"run {layout.run_id} in {store.url} was deleted meanwhile")


@contextmanager
def alone(store: Store, key: str, limit_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file ``key`` with nobody else.

    Raises:
        HeldError: somebody else did for ``limit_s`` seconds.
        StorageError: the file can't be made.
    """
    with _locked(store, key, fcntl.LOCK_EX, limit_s):
        yield


def _locked(store: Store, key: str, kind: int, limit_s: float) -> BinaryIO:
    path = store.local_file(key)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "ab")  # noqa: SIM115 - the lock is held until it is closed
        except OSError as error:
            raise refused(path, error) from error
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
            file.close()  # the holder before deleted it: this is a lock on nothing
        except BlockingIOError:
            file.close()
            if time.monotonic() >= deadline:
                raise HeldError(f"{path}: another process holds this lock") from None
            time.sleep(_POLL_S)
        except BaseException:
            file.close()
            raise


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(file.fileno())
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
