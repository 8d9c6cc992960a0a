"""Exactly once: ready -> claimed -> accumulated -> reduced, journalled, rebuilt from storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from storage.journal import Journal, read_journal
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import decode, encode
from tasks.training.events import (
    Accumulated,
    Arrived,
    Claimed,
    Event,
    Formed,
    LedgerLine,
    MicroStep,
    Opened,
    Reduced,
    Restarted,
    Returned,
    Stepped,
    Stepping,
)
from tasks.training.ledger_state import LedgerError, LedgerState, MicroState
from tasks.training.packing import SampleSize

__all__ = ["Ledger", "LedgerError", "MicroState"]


class Ledger(LedgerState):
    """The micro-steps of one step. One writer; every change is durable when a method returns.

    A change that would break the order of states is refused before it is written.
    """

    def __init__(self, store: Store, layout: RunLayout, step: int) -> None:
        super().__init__()
        prefix = layout.ledger(step)
        for line in read_journal(store, prefix):
            self.apply(decode(line, LedgerLine, where=prefix).event)
        self._journal = Journal(store, prefix, fsync=True)

    def open(self, version: int) -> None:
        self._do(Opened(version=version))

    def arrive(self, group: str, update: int) -> None:
        self._do(Arrived(group=group, update=update))

    def form(self, update: int, rows: Iterable[Sequence[SampleSize]]) -> None:
        """Make micro-steps of an update; their ids count on."""
        first = len(self._of(update))
        made = tuple(
            MicroStep(
                id=f"u{update:04d}-m{number:05d}",
                update=update,
                samples=tuple((sample.group, sample.index) for sample in row),
                tokens=sum(sample.tokens for sample in row),
                targets=sum(sample.targets for sample in row),
            )
            for number, row in enumerate(rows, first)
        )
        if made:
            self._do(Formed(micro_steps=made))

    def claim(self, update: int, replica: str) -> MicroStep | None:
        """Hand a ready micro-step to a replica; None when there is none."""
        for entry in self._of(update):
            if entry.state is MicroState.READY:
                self._do(Claimed(micro_step=entry.micro_step.id, replica=replica))
                return entry.micro_step
        return None

    def accumulate(self, micro_step: str, replica: str, stats: Mapping[str, float]) -> None:
        self._do(Accumulated(micro_step=micro_step, replica=replica, stats=dict(stats)))

    def reduce(self, replica: str) -> None:
        """The core holds what the replica accumulated; for the core: it does so by itself."""
        self._do(Reduced(replica=replica))

    def give_back(self, replica: str, reason: str) -> None:
        """A replica, and with it what it did not bring to the core, is gone."""
        self._do(Returned(replica=replica, reason=reason))

    def restart(self, update: int, reason: str) -> None:
        """The core's gradient or weights of an update are gone."""
        self._do(Restarted(update=update, reason=reason))

    def begin_step(self, update: int, executions: int, learning_rate: float) -> None:
        self._do(Stepping(update=update, executions=executions, learning_rate=learning_rate))

    def end_step(self, stepped: Stepped) -> None:
        self._do(stepped)

    def close(self) -> None:
        self._journal.close()

    def _do(self, event: Event) -> None:
        self.check(event)
        self._journal.append([encode(LedgerLine(event=event))])
        self.apply(event)
