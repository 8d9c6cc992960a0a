"""How far an event loop is behind: whoever blocks it holds up everybody, and says nothing."""

from __future__ import annotations

import asyncio
import logging
import time

LOOK_EVERY_S = 0.5
ALARM_S = 2.0

log = logging.getLogger("cells.lag")


class Lag:
    """Watches the loop that ``watch`` runs in.

    Args:
        name: of the daemon, for its log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.last_s = 0.0
        """Of the last look: by how much later than asked for the loop came back."""
        self.worst_s = 0.0
        self._recent_s = 0.0

    def take_recent(self) -> float:
        """The worst since this was last asked for, in seconds."""
        recent_s, self._recent_s = self._recent_s, 0.0
        return recent_s

    async def watch(self) -> None:
        """Until cancelled: measure, and warn of a loop that was ``ALARM_S`` behind."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(LOOK_EVERY_S)
            self.last_s = max(0.0, time.monotonic() - before - LOOK_EVERY_S)
            self.worst_s = max(self.worst_s, self.last_s)
            self._recent_s = max(self._recent_s, self.last_s)
            if self.last_s > ALARM_S:
                log.warning(
                    "%s: the event loop was %.1f s behind: something blocks it, or the machine has "
                    "too few cores for what runs",
                    self._name,
                    self.last_s,
                )
