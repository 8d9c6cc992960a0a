"""The storage root as a whole: of which format it is."""

from __future__ import annotations

import time

from storage.errors import MissingObjectError, StorageError
from storage.objects import Store
from storage.records import Record, RecordError

MARK = "gyre.json"


class StorageRoot(Record):
    """Beside everything else. Raise its format when keys move: roots of an older layout have to be
    told from those of this one before a single key of them is read."""

    made_at: float


def check_root(store: Store) -> None:
    """See that this version reads the root. One without a mark, which the first versions of Gyre
    left, is of format 1; an empty one is as good.

    Raises:
        StorageError: it is of another format, or can't be read.
    """
    try:
        store.read_record(MARK, StorageRoot)
    except MissingObjectError:
        return
    except RecordError as error:
        raise StorageError(
            f"storage root {store.url}: {error}; or take another storage root: --root, or "
            f"storage.root"
        ) from None


def mark_root(store: Store) -> None:
    """See that this version reads the root, and leave the mark that tells others the format.

    Raises:
        StorageError: it is of another format, or can't be written.
    """
    check_root(store)
    store.write_record_once(MARK, StorageRoot(made_at=time.time()))
