"""Reads a run's storage, and notes what can't be read instead of failing."""

from __future__ import annotations

from typing import TypeVar

from flows.fsck.finding import Finding, Kind
from storage.errors import StorageError
from storage.records import Record, RecordError, decode
from storage.run import Run
from storage.samples import SealedGroup, read_group

R = TypeVar("R", bound=Record)


class Reader:
    """What a run has stored, and everything that was found to be wrong with it so far."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.store = run.store
        self.layout = run.layout
        self.keys = frozenset(run.store.keys(run.layout.prefix))
        self.findings: list[Finding] = []
        self.checked: set[str] = set()
        """Keys that were read as what they are."""

    def note(self, kind: Kind, key: str, text: str) -> None:
        found = Finding(kind, key, text)
        if found not in self.findings:  # several checks read the same record
            self.findings.append(found)

    def require(self, holds: bool, key: str, text: str) -> None:
        """Note a contradiction unless ``holds``."""
        if not holds:
            self.note(Kind.CONTRADICTION, key, text)

    def below(self, prefix: str) -> list[str]:
        """Keys of the objects below a prefix, in order."""
        return sorted(key for key in self.keys if key.startswith(f"{prefix}/"))

    def record(self, key: str, kind: type[R]) -> R | None:
        """The record at ``key``; None where none is, or it can't be read."""
        if key not in self.keys:
            return None
        self.checked.add(key)
        try:
            return self.store.read_record(key, kind)
        except (RecordError, StorageError) as error:
            self.note(Kind.DAMAGED, key, _without(key, error))
            return None

    def group(self, key: str) -> SealedGroup | None:
        """The sealed group at ``key``; None where none is, or it can't be read."""
        if key not in self.keys:
            return None
        self.checked.add(key)
        try:
            return read_group(self.store, key)
        except (RecordError, StorageError) as error:
            self.note(Kind.DAMAGED, key, _without(key, error))
            return None

    def journal(self, prefix: str, kind: type[R]) -> list[R]:
        """The whole lines of a journal that can be read."""
        segments = self.below(prefix)
        for number, key in enumerate(segments):
            if key != f"{prefix}/{number:08d}.jsonl":
                self.note(Kind.MISSING, prefix, f"segment {number} is not there, later ones are")
                break
        return [record for key in segments for record in self.lines(key, kind)]

    def lines(self, key: str, kind: type[R]) -> list[R]:
        """The whole lines of an object that can be read. What comes after the last newline was
        never acknowledged to whoever wrote it."""
        if key not in self.keys:
            return []
        self.checked.add(key)
        try:
            *whole, torn = self.store.read(key).split(b"\n")
        except StorageError as error:
            self.note(Kind.DAMAGED, key, _without(key, error))
            return []
        if torn:
            text = f"line {len(whole) + 1} is torn: its writer was killed, or it was cut off"
            self.note(Kind.LEFT_OVER, key, text)
        found = []
        for number, line in enumerate(whole, 1):
            try:
                found.append(decode(line, kind, where=f"line {number}"))
            except RecordError as error:
                self.note(Kind.DAMAGED, key, str(error))
        return found


def _without(key: str, error: Exception) -> str:
    """What an error says, without the key that stands beside it."""
    return str(error).removeprefix(f"{key}: ")
