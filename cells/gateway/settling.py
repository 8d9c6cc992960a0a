"""A cell that leaves, and the pool of KV pages that its executions are to find its work in.

SGLang 0.5.23 (read in its source) writes a prompt's pages to the storage behind its cache after
the prefill, and what was generated only when the generation has ended or was aborted; both happen
beside its work. Nothing tells when that is done but calls that it refuses until then. Attaching the
storage that is attached is the one of them that changes nothing; ``/flush_cache`` stops the threads
that write, and ends the server where one is slow to stop.
"""

from __future__ import annotations

import asyncio
import logging

import orjson

from cells.gateway.routing import Cell
from cells.gateway.wire import Wire
from cells.serving.engine import SAME_STORAGE, STORAGE_PATH

PROBE_EVERY_S = 0.05

_SAME_STORAGE = orjson.dumps(SAME_STORAGE)

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
                while not await self._written(cell):  # noqa: ASYNC110  (it is another process)
                    await asyncio.sleep(PROBE_EVERY_S)
        except TimeoutError:
            log.warning("%s: pages not written within %g s", cell.name, self._limit_s)
        except (OSError, ValueError) as error:
            log.warning("%s: can't tell whether its pages are written: %r", cell.name, error)

    async def _written(self, cell: Cell) -> bool:
        status, _ = await self._wire.post(
            cell.url, STORAGE_PATH, cell.token, [_SAME_STORAGE], _ignore, method="PUT"
        )
        return status == 200


def _ignore(data: bytes) -> None:
    """A text for people."""
