"""Exactly once: ready -> claimed -> accumulated -> reduced, journalled, rebuilt from storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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
from tasks.training.packing import SampleSize


class LedgerError(RuntimeError):
    """Something would be trained twice, lost, or out of order; the text says what."""


class MicroState(StrEnum):
    """Where the gradient of a micro-step is."""

    READY = "ready"
    CLAIMED = "claimed"
    ACCUMULATED = "accumulated"
    REDUCED = "reduced"


@dataclass
class _Entry:
    micro_step: MicroStep
    state: MicroState = MicroState.READY
    replica: str | None = None
    stats: Mapping[str, float] = field(default_factory=dict)


class Ledger:
    """The micro-steps of one step. One writer; every change is durable when a method returns.

    A change that would break the order of states is refused before it is written.
    """

    def __init__(self, store: Store, layout: RunLayout, step: int) -> None:
        prefix = layout.ledger(step)
        self.version: int | None = None
        """Of the weights at the step's first update; None before training was opened."""
        self._groups: dict[str, int] = {}
        self._entries: dict[str, _Entry] = {}
        self._formed: set[tuple[str, int]] = set()
        self._stepping: dict[int, Stepping] = {}
        self._stepped: dict[int, Stepped] = {}
        self._closed: set[int] = set()
        for line in read_journal(store, prefix):
            self._apply(decode(line, LedgerLine, where=prefix).event)
        self._journal = Journal(store, prefix, fsync=True)

    # What is known.

    def groups(self) -> Mapping[str, int]:
        """Update of each group that has arrived, in order of arrival."""
        return self._groups

    def formed(self, group: str, index: int) -> bool:
        """Whether a sample is in a micro-step."""
        return (group, index) in self._formed

    def micro_steps(self, update: int) -> list[MicroStep]:
        return [entry.micro_step for entry in self._of(update)]

    def count(self, update: int, *states: MicroState) -> int:
        return sum(entry.state in states for entry in self._of(update))

    def holders(self, update: int) -> list[str]:
        """Replicas with an accumulated gradient that is not at the core."""
        found = {e.replica for e in self._of(update) if e.state is MicroState.ACCUMULATED}
        return sorted(name for name in found if name is not None)

    def held(self, update: int, replica: str) -> list[str]:
        """Micro-steps in a replica's own gradient."""
        return [
            entry.micro_step.id
            for entry in self._of(update)
            if entry.state is MicroState.ACCUMULATED and entry.replica == replica
        ]

    def at_core(self, update: int, core: str) -> set[str]:
        """Micro-steps that are in the gradient of the core."""
        return {
            entry.micro_step.id
            for entry in self._of(update)
            if entry.state is MicroState.REDUCED
            or (entry.state is MicroState.ACCUMULATED and entry.replica == core)
        }

    def stats(self, update: int) -> list[Mapping[str, float]]:
        """What the replicas reported, of each reduced micro-step once."""
        return [e.stats for e in self._of(update) if e.state is MicroState.REDUCED]

    def closed(self, update: int) -> bool:
        """Whether an update's groups are final: it was stepped, or was about to be, once."""
        return update in self._closed

    def stepping(self, update: int) -> Stepping | None:
        """What the core was told at the end of an update, also where that is done again."""
        return self._stepping.get(update)

    def stepped(self, update: int) -> Stepped | None:
        return self._stepped.get(update)

    # What happens.

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
        self._check(event)
        self._journal.append([encode(LedgerLine(event=event))])
        self._apply(event)

    def _check(self, event: Event) -> None:
        """Refuse what would train something twice or lose it."""
        match event:
            case Opened():
                self._demand(self.version is None, event)
            case Arrived(group=group, update=update):
                self._demand(group not in self._groups and update not in self._closed, event)
            case Formed(micro_steps=made):
                samples = [sample for micro_step in made for sample in micro_step.samples]
                self._demand(len(set(samples)) == len(samples), event)
                self._demand(self._formed.isdisjoint(samples), event)
                for micro_step in made:
                    self._demand(micro_step.id not in self._entries, event)
                    self._demand(micro_step.update not in self._closed, event)
                    updates = {self._groups.get(group) for group, _ in micro_step.samples}
                    self._demand(updates == {micro_step.update}, event)
            case Claimed(micro_step=name):
                entry = self._entries.get(name)
                self._demand(entry is not None and entry.state is MicroState.READY, event)
            case Accumulated(micro_step=name, replica=replica):
                entry = self._entries.get(name)
                self._demand(
                    entry is not None
                    and entry.state is MicroState.CLAIMED
                    and entry.replica == replica,
                    event,
                )
            case Stepping(update=update) | Stepped(update=update):
                self._demand(update not in self._stepped, event)
                missing = len(self._of(update)) - self.count(update, MicroState.REDUCED)
                self._demand(missing == 0, event)
            case Reduced() | Returned() | Restarted():
                pass

    def _demand(self, holds: bool, event: Event) -> None:
        if not holds:
            raise LedgerError(f"refused, it would break the order of states: {event!r}")

    def _apply(self, event: Event) -> None:
        match event:
            case Opened(version=version):
                self.version = version
            case Arrived(group=group, update=update):
                self._groups[group] = update
            case Formed(micro_steps=made):
                for micro_step in made:
                    self._entries[micro_step.id] = _Entry(micro_step)
                    self._formed.update(micro_step.samples)
            case Claimed(micro_step=name, replica=replica):
                self._entries[name].state = MicroState.CLAIMED
                self._entries[name].replica = replica
            case Accumulated(micro_step=name, stats=stats):
                self._entries[name].state = MicroState.ACCUMULATED
                self._entries[name].stats = stats
            case Reduced(replica=replica):
                for entry in self._entries.values():
                    if entry.replica == replica and entry.state is MicroState.ACCUMULATED:
                        entry.state = MicroState.REDUCED
            case Returned(replica=replica):
                for entry in self._entries.values():
                    if entry.replica == replica and entry.state is not MicroState.REDUCED:
                        self._release(entry)
            case Restarted(update=update):
                self._stepped.pop(update, None)
                for entry in self._of(update):
                    self._release(entry)
            case Stepping():
                self._stepping[event.update] = event
                self._closed.add(event.update)
            case Stepped():
                self._stepped[event.update] = event
                self._closed.add(event.update)

    def _release(self, entry: _Entry) -> None:
        entry.state, entry.replica, entry.stats = MicroState.READY, None, {}

    def _of(self, update: int) -> list[_Entry]:
        return [e for e in self._entries.values() if e.micro_step.update == update]
