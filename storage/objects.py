"""Objects that are visible whole or not at all, on any fsspec file system."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from storage.errors import DiskFullError, MissingObjectError, StorageError, refused
from storage.records import Record, decode, encode

__all__ = ["DiskFullError", "Entry", "MissingObjectError", "StorageError", "Store"]

R = TypeVar("R", bound=Record)

OBJECT_LIMIT_BYTES = 8 << 30
_ASIDE = ".writing-"


@dataclass(frozen=True)
class Entry:
    """An object as a listing tells of it."""

    key: str
    size: int
    """Bytes."""
    changed_at: float
    """Seconds since the epoch; 0 where the store does not tell."""


class Store:
    """Objects under one root.

    Args:
        root: a folder or an fsspec URL (``s3://bucket/prefix``). Keys are relative to it and use
            forward slashes.
    """

    def __init__(self, root: str | Path) -> None:
        self.url = str(root)
        # Others write too: what was listed a second ago may be another thing now.
        self._fs, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        self._root = path.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._refusals: tuple[type[Exception], ...] = (OSError,)
        if not self._local:
            self._refusals += _client_errors()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def is_local(self) -> bool:
        """Whether the objects are files of this machine's file systems."""
        return self._local

    def read(self, key: str) -> bytes:
        """The bytes at ``key``.

        Raises:
            MissingObjectError: nothing is there.
            StorageError: the object is larger than the limit or can't be read.
        """
        path = self._path(key)
        try:
            size = self._fs.size(path)
            if size is not None and size > OBJECT_LIMIT_BYTES:
                raise StorageError(f"{path}: {size} bytes, more than {OBJECT_LIMIT_BYTES}")
            data = self._fs.cat_file(path)
        except FileNotFoundError:
            raise MissingObjectError(f"{path}: no such object") from None
        except self._refusals as error:
            raise refused(path, error, "can't be read") from error
        return bytes(data)

    def read_from(self, key: str, offset: int, size: int | None = None) -> bytes:
        """The bytes of an object from ``offset`` on, at most ``size``; none where it is shorter or
        missing.

        Raises:
            StorageError: it can't be read.
        """
        path = self._path(key)
        self._fs.invalidate_cache(path)  # others write it
        try:
            if self._fs.size(path) <= offset:
                return b""
            end = None if size is None else offset + size
            return bytes(self._fs.cat_file(path, start=offset, end=end))
        except FileNotFoundError:
            return b""
        except self._refusals as error:
            raise refused(path, error, "can't be read") from error

    def written_at(self, key: str) -> float | None:
        """When the object was last written, in seconds since the epoch; None where none is."""
        try:
            return float(self._fs.modified(self._path(key)).timestamp())
        except FileNotFoundError:
            return None

    def exists(self, key: str) -> bool:
        """Whether an object (not a folder) is at ``key``."""
        return bool(self._fs.isfile(self._path(key)))

    def write(self, key: str, data: bytes) -> None:
        """Put ``data`` at ``key``, replacing what is there. Readers see the old or the new whole.

        Raises:
            StorageError: the store is full or refuses; nothing half-written stays visible.
        """
        path = self._path(key)
        if not self._local:
            # Object stores make one put visible at once, so there is nothing to move.
            try:
                self._fs.pipe_file(path, data)
            except self._refusals as error:
                raise refused(path, error) from error
            return
        aside = self._write_aside(path, data)
        try:
            os.replace(aside, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(aside)
            raise refused(path, error) from error

    def write_once(self, key: str, data: bytes) -> bool:
        """Put ``data`` at ``key`` unless something is there already; False when it is.

        Two writers at once can't both succeed, on an object store neither as long as it knows
        conditional puts (``If-None-Match``), as s3, MinIO and R2 do.
        """
        path = self._path(key)
        if not self._local:
            if self.exists(key):
                return False
            try:
                self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                # The client tries again when an answer is lost, and then finds what it has written.
                # An empty object is a number that somebody takes, and says nothing of who.
                return bool(data) and self.read(key) == data
            except self._refusals as error:
                raise refused(path, error) from error
            return True
        if os.path.exists(path):
            return False
        aside = self._write_aside(path, data)
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise refused(path, error) from error
        finally:
            os.unlink(aside)
        return True

    def keys(self, prefix: str) -> list[str]:
        """Keys of all objects below ``prefix``, sorted; empty when there are none."""
        return sorted(self._walk(prefix))

    def entries(self, prefix: str) -> list[Entry]:
        """All objects below ``prefix`` with their sizes, those being written too, sorted by key."""
        skip = len(self._root) + 1
        self._fs.invalidate_cache()
        found = self._fs.find(self._path(prefix), detail=True)
        return sorted(
            (
                Entry(str(path)[skip:], int(info.get("size") or 0), _changed_at(info))
                for path, info in found.items()
            ),
            key=lambda entry: entry.key,
        )

    def children(self, prefix: str) -> list[str]:
        """Names (not keys) of objects and folders directly below ``prefix``, sorted.

        Raises:
            StorageError: it can't be listed.
        """
        path = self._path(prefix)
        try:
            entries = self._fs.ls(path, detail=False, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except self._refusals as error:
            raise refused(path, error, "can't be listed") from error
        names = (str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)
        return sorted(name for name in names if not name.startswith(_ASIDE))

    def delete(self, prefix: str) -> None:
        """Remove an object or everything below a prefix, with what this machine has of it; nothing
        there is no error.

        Raises:
            StorageError: the store refuses.
        """
        path = self._path(prefix)
        if self._fs.exists(path):
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                pass  # another deleted it meanwhile
            except self._refusals as error:
                raise refused(path, error, "can't be deleted") from error
        if not self._local:
            copy = self.local_file(prefix)
            if copy.is_file():
                copy.unlink(missing_ok=True)
            else:
                shutil.rmtree(copy, ignore_errors=True)

    def upload(self, key: str, file: Path) -> None:
        """Put a file at ``key`` without having all of it in memory.

        Raises:
            StorageError: the store refuses.
        """
        path = self._path(key)
        try:
            self._fs.put_file(str(file), path)
        except self._refusals as error:
            raise refused(path, error) from error

    def download(self, key: str, file: Path) -> None:
        """Write the object at ``key`` to a file.

        Raises:
            MissingObjectError: nothing is there.
            StorageError: it can't be read, or the file not be written.
        """
        path = self._path(key)
        try:
            self._fs.get_file(path, str(file))
        except FileNotFoundError:
            raise MissingObjectError(f"{path}: no such object") from None
        except self._refusals as error:
            raise refused(path, error, f"can't be copied to {file}") from error

    def local_file(self, key: str) -> Path:
        """A path on this machine for what is appended to, locked or thrown away, as logs are, and
        for copies of objects: behind ``key`` where the store is local, else in the user's cache."""
        if self._local:
            return self.local_path(key)
        name = hashlib.sha256(self.url.rstrip("/").encode()).hexdigest()[:12]
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "gyre" / name / key

    def local_path(self, key: str) -> Path:
        """The file behind ``key``, for programs that need a path.

        Raises:
            StorageError: this store is not a local file system.
        """
        if not self._local:
            raise StorageError(f"{self.url}: {key} has no path on this machine")
        return Path(self._path(key))

    def write_record(self, key: str, record: Record) -> None:
        """Put a record at ``key`` as JSON."""
        self.write(key, encode(record))

    def write_record_once(self, key: str, record: Record) -> bool:
        """Put a record at ``key`` unless something is there; False when it is."""
        return self.write_once(key, encode(record))

    def read_record(self, key: str, kind: type[R]) -> R:
        """The record at ``key``.

        Raises:
            MissingObjectError: nothing is there.
            RecordError: it is not a record of that kind, or of a format this version can't read.
        """
        return decode(self.read(key), kind, where=key)

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if key.startswith("/") or ".." in parts:
            raise StorageError(f"{key!r}: not a key below the storage root")
        return f"{self._root}/{key}" if key else self._root

    def _write_aside(self, path: str, data: bytes) -> str:
        folder, name = os.path.split(path)
        aside = os.path.join(folder, f"{_ASIDE}{name}-{secrets.token_hex(4)}")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.unlink(aside)
            raise refused(path, error) from error
        return aside

    def _walk(self, prefix: str) -> Iterator[str]:
        path = self._path(prefix)
        skip = len(self._root) + 1
        self._fs.invalidate_cache()  # others write too
        for found in self._fs.find(path):
            if not str(found).rsplit("/", 1)[-1].startswith(_ASIDE):
                yield str(found)[skip:]


def _client_errors() -> tuple[type[Exception], ...]:
    """What a client of an object store raises besides errors of the system: no credentials, no
    region, no answer."""
    try:
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return ()
    return (BotoCoreError,)


def _changed_at(info: dict[str, Any]) -> float:
    """The time of the last change in a listing's entry, whatever the file system calls it."""
    for name in ("mtime", "LastModified", "last_modified", "modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
