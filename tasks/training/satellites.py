"""What training knows of the satellites: whose weights are current, and who failed lately."""

from __future__ import annotations

import time
from collections import Counter

_LONGEST_PAUSE_S = 30.0


class Satellites:
    """Kept over all updates of a step. A satellite that is not known to hold a version has to join:
    empty its gradient, and pull."""

    def __init__(self) -> None:
        self._weights: dict[str, int] = {}
        self._losses: Counter[str] = Counter()
        self._retry_at: dict[str, float] = {}

    def hold(self, name: str, version: int) -> bool:
        """Whether it has these weights and no gradient but what the ledger says."""
        return self._weights.get(name) == version

    def may_join(self, name: str) -> bool:
        """Whether the pause after its last failure is over; the first one costs none."""
        return self._retry_at.get(name, 0.0) <= time.monotonic()

    def joined(self, name: str, version: int) -> None:
        self._weights[name] = version

    def worked(self, name: str) -> None:
        """It has finished a micro-step: earlier failures are forgotten."""
        self._losses.pop(name, None)

    def doubt(self, name: str) -> None:
        """It has to join before it goes on."""
        self._weights.pop(name, None)

    def doubt_all(self) -> None:
        self._weights.clear()

    def failed(self, name: str) -> None:
        """It has to join, after a pause that grows with its failures in a row."""
        self.doubt(name)
        pause = min(_LONGEST_PAUSE_S, 0.5 * (2 ** self._losses[name] - 1))
        self._losses[name] += 1
        self._retry_at[name] = time.monotonic() + pause
