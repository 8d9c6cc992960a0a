"""The fencing number of a run's managers."""

from __future__ import annotations

from storage.layout import RunLayout
from storage.objects import Store


def take_epoch(store: Store, layout: RunLayout) -> int:
    """A number higher than any taken before; hosts refuse commands of lower ones.

    Two managers that start at once get different numbers: the object of a number can be written
    only once.
    """
    taken = store.children(layout.epochs)
    number = int(taken[-1]) + 1 if taken else 1
    while not store.write_once(f"{layout.epochs}/{number:08d}", b""):
        number += 1
    return number
