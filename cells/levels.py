"""What the manager saw, as a row of a journal: the waterlevel and the roles of cells over time."""

from __future__ import annotations

import time

from cells.scheduler import Role, Snapshot
from storage.journal import Journal
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Record, encode

SMALLEST_GAP_S = 1.0
"""A picture of a run, and a person who watches it, need no more than a row a second."""
LARGEST_GAP_S = 30.0
"""A row is written this often also when nothing changes: it shows that the manager lives."""
_REMOTE_FLUSH_S = 30.0
"""Each write to an object store makes an object, so several rows go into one."""


class Level(Record):
    """The state of a step or an evaluation at one moment."""

    at: float
    """Seconds since the epoch."""
    step: int
    """-1 in an evaluation."""
    version: int
    """Weight version that rollouts are served with."""
    queued: int
    """Live executions that no cell has a place for, or that have not called yet."""
    running: int
    """Live executions that are bound to a cell."""
    capacity: int
    """Places of the cells that serve."""
    roles: dict[str, Role]
    """Role by cell; a cell that has failed is missing."""
    expected: int
    """Micro-steps of the due samples that are not accumulated yet."""
    sealed: int
    claimed: int
    tokens_out: int
    """Tokens that the gateway's process has sampled; starts again with a new gateway."""


class LevelLog:
    """Writes a row when something changed, at most one a second."""

    def __init__(self, store: Store, layout: RunLayout, step: int) -> None:
        self._journal = Journal(store, layout.levels)
        self._remote = not store.is_local
        self._step = step
        self._last: Level | None = None
        self._unwritten: list[bytes] = []
        self._written_at = time.time()

    def note(self, snapshot: Snapshot, tokens_out: int) -> None:
        """Write the snapshot unless the last row is too young or says the same.

        Raises:
            StorageError: the store is full or refuses.
        """
        now = time.time()
        level = Level(
            at=now,
            step=self._step,
            version=snapshot.versions.highest,
            queued=snapshot.queued,
            running=snapshot.running,
            capacity=sum(cell.capacity for cell in snapshot.serving()),
            roles={cell.cell_id: cell.role for cell in snapshot.cells},
            expected=snapshot.training.expected,
            sealed=snapshot.training.sealed,
            claimed=snapshot.training.claimed,
            tokens_out=tokens_out,
        )
        if self._last is not None and not _is_news(self._last, level):
            return
        self._last = level
        self._unwritten.append(encode(level))
        if not self._remote or now - self._written_at >= _REMOTE_FLUSH_S:
            self._flush(now)

    def close(self) -> None:
        """Write what is left.

        Raises:
            StorageError: the store is full or refuses.
        """
        try:
            self._flush(time.time())
        finally:
            self._journal.close()

    def _flush(self, now: float) -> None:
        self._journal.append(self._unwritten)
        self._unwritten.clear()
        self._written_at = now


def _is_news(last: Level, level: Level) -> bool:
    age = level.at - last.at
    # A change of roles is rare and exact; everything else can wait for its second.
    if level.roles != last.roles or age >= LARGEST_GAP_S:
        return True
    return age >= SMALLEST_GAP_S and level.model_copy(update={"at": last.at}) != last
