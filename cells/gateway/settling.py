"""A cell that leaves, and the pool of KV pages that its executions are to find its work in.

SGLang 0.5.23 (read in its source) writes a prompt's pages to the storage behind its cache after
the prefill, and what was generated only when the generation has ended or was aborted; both happen
beside its work. ``/flush_cache`` with a timeout answers when nothing runs and nothing is left to be
written, and empties the engine's own cache, which a cell that leaves has no more use for. While one
such call waits it refuses others.
"""

from __future__ import annotations

import asyncio
import logging

from cells.gateway.routing import Cell
from cells.gateway.wire import Wire

REFUSED_PAUSE_S = 0.05

log = logging.getLogger(__name__)


class Settler:
    """Waits for engines to write their pages.

    Args:
        limit_s: longest wait; what is not written by then is computed anew by whoever needs it.
    """

    def __init__(self, wire: Wire, limit_s: float) -> None:
        self._wire = wire
        self._limit_s = limit_s

    async def settle(self, cell: Cell) -> None:
        """Until all that ``cell`` computed is in the pool, its engine is gone, or the limit."""
        try:
            async with asyncio.timeout(self._limit_s):
                while not await self._flushed(cell):  # noqa: ASYNC110  (it is another process)
                    await asyncio.sleep(REFUSED_PAUSE_S)
        except TimeoutError:
            log.warning("%s: pages not written within %g s", cell.name, self._limit_s)
        except (OSError, ValueError) as error:
            log.warning("%s: can't tell whether its pages are written: %r", cell.name, error)

    async def _flushed(self, cell: Cell) -> bool:
        path = f"/flush_cache?timeout={self._limit_s:g}"
        status, _ = await self._wire.post(cell.url, path, cell.token, [b"{}"], _ignore)
        return status == 200


def _ignore(data: bytes) -> None:
    """A text for people."""
