"""Objects as files of this machine, for programs that take a path: engines, replicas, loaders.

Only for what never changes under its key, as policies and checkpoints: a copy is not compared with
its object again but for their sizes.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from storage.errors import MissingObjectError, refused
from storage.objects import Store


def local_copy(store: Store, key: str, *, without: str | None = None) -> Path:
    """The object at ``key``, or the folder of all objects below it: where it lies on a local store,
    else a copy in the user's cache, whose missing files are fetched first.

    Args:
        without: end of the names of files that are not needed and need not be fetched.

    Raises:
        MissingObjectError: nothing is at ``key`` of a store that is not local.
        StorageError: it can't be read, or the cache not be written.
    """
    target = store.local_file(key)
    if store.is_local:
        return target
    entries = store.entries(key)
    if not entries:
        raise MissingObjectError(f"{store.url}/{key}: no such object")
    for entry in entries:
        if without is not None and entry.key.endswith(without):
            continue
        file = store.local_file(entry.key)
        if not (file.is_file() and file.stat().st_size == entry.size):
            _fetch(store, entry.key, file)
    return target


def send_copy(store: Store, key: str) -> None:
    """Put the files that were made below ``local_file(key)`` into the store, where it is another
    place. They become visible one by one: whoever reads them looks for a manifest first.

    Raises:
        StorageError: the store refuses.
    """
    folder = store.local_file(key)
    if store.is_local:
        return
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        store.upload(f"{key}/{file.relative_to(folder).as_posix()}", file)


def _fetch(store: Store, key: str, file: Path) -> None:
    """Another process may do the same: each has a file of its own until it is whole."""
    aside = file.with_name(f".writing-{file.name}-{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        store.download(key, aside)
        os.replace(aside, file)
    except OSError as error:
        raise refused(file, error) from error
    finally:
        with suppress(OSError):
            aside.unlink()
