"""What the ledger of a step says of its micro-steps: which order of events makes sense. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tasks.training.events import (
    Accumulated,
    Arrived,
    Claimed,
    Event,
    Formed,
    MicroStep,
    Opened,
    Reduced,
    Restarted,
    Returned,
    Stepped,
    Stepping,
)


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


class LedgerState:
    """The micro-steps of one step after some events."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Of the weights at the step's first update; None before training was opened."""
        self._groups: dict[str, int] = {}
        self._entries: dict[str, _Entry] = {}
        self._formed: set[tuple[str, int]] = set()
        self._stepping: dict[int, Stepping] = {}
        self._stepped: dict[int, Stepped] = {}
        self._closed: set[int] = set()

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

    def check(self, event: Event) -> None:
        """Refuse what would train something twice or lose it.

        Raises:
            LedgerError: says which event.
        """
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

    def apply(self, event: Event) -> None:
        """Take in an event that was checked when it happened."""
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
