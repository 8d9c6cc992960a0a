"""What a store says when it refuses: what is wrong, where, and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


class StorageError(RuntimeError):
    """The store refused or lost something; the text names the key and what to do."""


class MissingObjectError(StorageError):
    """No object at that key."""


class DiskFullError(StorageError):
    """No room is left where the store is. Nothing of the write is visible; earlier objects are."""


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_CODES = frozenset(("XMinioStorageFull", "QuotaExceeded", "InsufficientStorage"))
"""Of MinIO, of Ceph, and of stores that answer with the status of WebDAV."""


def refused(path: str | Path, error: Exception, what: str = "can't be written") -> StorageError:
    """The error to raise for what the system, or the client of a store, said about ``path``."""
    if not isinstance(error, OSError):
        return StorageError(f"{path}: {what}: {error}")
    if (code := _store_code(error)) in _FULL_CODES:
        return DiskFullError(
            f"{path}: {what}: the store is full ({code}). Free some there: gyre gc --dry-run shows "
            f"what can go; then retry, or go on with gyre train --resume"
        )
    text = f"{path}: {what}: {error.strerror or error}{_advice(path, error)}"
    return DiskFullError(text) if error.errno in _FULL else StorageError(text)


def _store_code(error: OSError) -> str:
    """The word of an object store behind an error that its client has translated."""
    answer = getattr(error.__cause__, "response", None)
    found = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return str(found or "")


def _advice(path: str | Path, error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC:
            return (
                f" ({_free(path)}). Free some: gyre gc --dry-run shows what can go; then retry, or "
                f"go on with gyre train --resume"
            )
        case errno.EDQUOT:
            return ". Your quota there is used up: gyre gc --dry-run shows what can go"
        case errno.EROFS:
            return ". Take a storage root that can be written: --root, or storage.root"
        case errno.EACCES | errno.EPERM:
            return (
                f". User {os.geteuid()} has no right to: change the owner or the mode, or take "
                f"another storage root: --root, or storage.root"
            )
        case errno.ENOTDIR | errno.EEXIST:
            return ". A file is where a folder is needed: move it, or take another storage root"
        case errno.EMFILE | errno.ENFILE:
            return ". Too many files are open: raise the limit (ulimit -n 65536)"
        case _:
            return ""


def _free(path: str | Path) -> str:
    """Room on the file system that holds ``path``, or would."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
        inodes = os.statvfs(place)
    except OSError:
        return "how full it is can't be told"
    if inodes.f_files and not inodes.f_favail:
        return f"no inode of {inodes.f_files:,} is free"
    return f"{usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB are free"
