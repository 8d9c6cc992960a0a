"""Numbers that only rise: the epochs of managers, and the owners of a run's daemons."""

from __future__ import annotations

from storage.layout import RunLayout
from storage.objects import Store


def take_epoch(store: Store, layout: RunLayout) -> int:
    """A number higher than any taken before; hosts refuse commands of lower ones."""
    return _take(store, layout.epochs)


def take_ownership(store: Store, layout: RunLayout) -> int:
    """The number of whoever keeps the daemons of a run from now on."""
    return _take(store, layout.owners)


def owns(store: Store, layout: RunLayout, number: int) -> bool:
    """Whether nobody has taken the daemons over since ``number`` was taken."""
    return int(store.children(layout.owners)[-1]) == number


def _take(store: Store, prefix: str) -> int:
    """Two that ask at once get different numbers: each one's object can be written only once."""
    taken = store.children(prefix)
    number = int(taken[-1]) + 1 if taken else 1
    while not store.write_once(f"{prefix}/{number:08d}", b""):
        number += 1
    return number
