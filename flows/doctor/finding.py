"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """A run can start; something is slower, or fails later in a rare case."""
    FAIL = "fail"
    """A run can't start, or can't end well."""


@dataclass(frozen=True)
class Finding:
    """One row of ``gyre doctor``."""

    check: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty where nothing has to be done, or ``found`` says it already."""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.WARN, found, advice)


def fail(check: str, found: str, advice: str = "") -> Finding:
    return Finding(check, Status.FAIL, found, advice)
