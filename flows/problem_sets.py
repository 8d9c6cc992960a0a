"""New problem sets in storage: each is told of once, as an event that can start a training."""

from __future__ import annotations

from storage.copies import local_copy
from storage.objects import Store

FOLDER = "problem_sets"
CONFIGURATION = "train.yaml"
"""Written last into the folder of a set: the configuration that trains on it."""
_TOLD = "told"


def tell_new(store: Store) -> list[str]:
    """Send an event for every whole set that nobody was told of; their names.

    Raises:
        StorageError: storage can't be read or written.
    """
    from flows.events import problems_added  # only now: prefect reads where its server is

    told = []
    for name in store.children(FOLDER):
        key = f"{FOLDER}/{name}/{CONFIGURATION}"
        if store.exists(key) and store.write_once(f"{FOLDER}/{name}/{_TOLD}", b""):
            problems_added(store.url, name, str(local_copy(store, key)))
            told.append(name)
    return told
