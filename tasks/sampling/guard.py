"""Stops a step before a group is fixed for ever that our own failures made worthless."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class TooManyExcludedError(RuntimeError):
    """More executions are excluded than scoring.max_excluded_share allows."""


class ExclusionGuard:
    """Counts excluded executions by batch, in the order in which groups are sealed.

    A batch is what is counted together: an update, or what several updates are shuffled from.

    Training checks each update before its step; by then its groups are sealed, and a verdict that
    comes later is not trained. So the same share is watched here, where a group that is refused
    stays open, and a retry after the repair scores it again.

    Args:
        shares: groups of each batch, in order of arrival.
        group_size: executions of a group.
        max_share: of a batch's executions that may be excluded.
    """

    def __init__(self, shares: Sequence[int], group_size: int, max_share: float) -> None:
        self._executions = [share * group_size for share in shares]
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
            batch = self._next()
            self._excluded[batch] += excluded
            self._left[batch] -= 1

    def admit(self, query: str, excluded: int) -> None:
        """Count a group that is about to be sealed.

        Raises:
            TooManyExcludedError: with it, its batch has too many excluded executions.
        """
        with self._lock:
            batch = self._next()
            found, executions = self._excluded[batch] + excluded, self._executions[batch]
            if excluded and found > self._max_share * executions:
                raise TooManyExcludedError(
                    f"{query}: with this group {found} of the {executions} executions that are "
                    f"counted together have no reward, more than the share of "
                    f"{self._max_share:g} that scoring.max_excluded_share allows. The failed score "
                    f"tasks say why: mend the cause and retry the run"
                )
            self._excluded[batch] = found
            self._left[batch] -= 1

    def _next(self) -> int:
        """Batch of the next group."""
        return next((i for i, left in enumerate(self._left) if left > 0), len(self._left) - 1)
