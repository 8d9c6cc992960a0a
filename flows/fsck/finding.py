"""What is wrong with what a run has in storage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How something is wrong."""

    DAMAGED = "damaged"
    """It can't be read, or its checksum differs."""
    MISSING = "missing"
    """Something that is there needs it."""
    CONTRADICTION = "contradiction"
    """It and something else can't both be true."""
    REPEATED = "repeated"
    """It is there twice, or was done twice."""
    LEFT_OVER = "left over"
    """Nothing refers to it, or its writer was killed. It does no harm: only noted."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, where, and why."""

    kind: Kind
    key: str
    """Object, or journal, relative to the storage root."""
    text: str

    @property
    def is_error(self) -> bool:
        return self.kind is not Kind.LEFT_OVER
