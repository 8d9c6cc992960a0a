"""Stops a step before a group is fixed for ever that our own failures made worthless."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class TooManyExcludedError(RuntimeError):
    """More executions are excluded than scoring.max_excluded_share allows."""


class ExclusionGuard:
    """Counts excluded executions by update, in the order in which groups are sealed.

    Training checks each update before its step; by then its groups are sealed, and a verdict that
    comes later is not trained. So the same share is watched here, where a group that is refused
    stays open, and a retry after the repair scores it again.

    Args:
        shares: groups of each update, in order of arrival.
        group_size: executions of a group.
        max_share: of an update's executions that may be excluded.
    """

    def __init__(self, shares: Sequence[int], group_size: int, max_share: float) -> None:
        self._allowed = [max_share * share * group_size for share in shares]
        self._left = list(shares)
        self._excluded = [0] * len(shares)
        self._max_share = max_share
        self._lock = threading.RLock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Admit, seal and hand over one group at a time: training shares groups out over updates in
        the order in which they come, which has to be the one they were counted in."""
        with self._lock:
            yield

    def count(self, excluded: int) -> None:
        """Count a group that an earlier attempt has sealed. It is never refused."""
        with self._lock:
            update = self._next()
            self._excluded[update] += excluded
            self._left[update] -= 1

    def admit(self, query: str, excluded: int) -> None:
        """Count a group that is about to be sealed.

        Raises:
            TooManyExcludedError: with it, its update has too many excluded executions.
        """
        with self._lock:
            update = self._next()
            found = self._excluded[update] + excluded
            if excluded and found > self._allowed[update]:
                raise TooManyExcludedError(
                    f"{query}: with this group {found} executions of update {update} have no "
                    f"reward, more than the share of {self._max_share:g} that "
                    f"scoring.max_excluded_share allows. The failed score tasks say why: mend the "
                    f"cause and retry the run"
                )
            self._excluded[update] = found
            self._left[update] -= 1

    def _next(self) -> int:
        """Update of the next group."""
        return next((i for i, left in enumerate(self._left) if left > 0), len(self._left) - 1)
