"""What was read of an execution's histories before, so that only what is new is read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cells.gateway.bodies import Bodies
from cells.gateway.forms import Message

KEPT = 4
"""Histories that are remembered: of the agents that take turns."""


class Seen:
    """The newest histories as clients sent them, and what they were read as.

    Comparing is C's and reads each text once, which costs a hundredth of reading it again; and
    what is the same object needs no further comparison when calls are matched. What is given out
    is shared and must not be changed.
    """

    def __init__(self) -> None:
        self.bodies = Bodies()
        self._kept: list[tuple[list[Any], list[Message]]] = []

    def read(self, items: list[Any], convert: Callable[[Any, int], list[Message]]) -> list[Message]:
        """The messages of a history.

        Args:
            items: as the client sent them.
            convert: the messages of one item at its index.
        """
        known: list[Message] = []
        start = 0
        for entry in self._kept:
            count = len(entry[0])
            if (
                0 < count <= len(items)
                and items[count - 1] == entry[0][count - 1]
                and items[:count] == entry[0]
            ):
                known, start = entry[1], count
                self._kept.remove(entry)
                break
        read = [*known]
        for index in range(start, len(items)):
            read += convert(items[index], index)
        self._kept = [(items, read), *self._kept[: KEPT - 1]]
        return read
