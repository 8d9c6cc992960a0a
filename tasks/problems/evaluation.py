"""Bounds, place and outcome of an evaluation. Imports little: every pytest run pays for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class EvaluatorError(RuntimeError):
    """Our side of an evaluation failed, so there is no score. The agent's code never causes it."""

    reason: str = "evaluator"
    """A word to count exclusions by."""


@dataclass(frozen=True)
class EvaluationLimits:
    """Bounds of one evaluation."""

    seconds: float
    """Wall time of all tests together."""
    memory_mb: int
    """Address space of each process that runs the agent's code."""


@dataclass(frozen=True)
class Mounted:
    """A file or folder that tests need to see at some path, beside the workspace."""

    source: Path
    target: str
    """Absolute path inside."""
    writable: bool = False


class Enclosure(Protocol):
    """What keeps the agent's code away from the machine while it is tested."""

    @property
    def ends_all(self) -> bool:
        """Whether the kernel ends everything inside together with the command."""
        ...

    def prefix(self, inside: str | None = None, mounts: Sequence[Mounted] = ()) -> list[str]:
        """Argv in front of a command, which starts in the workspace.

        Args:
            inside: absolute path at which the workspace is seen.
            mounts: what is seen besides.

        Raises:
            EvaluatorError: this kind of sandbox has no other paths than the machine's.
        """
        ...


@dataclass(frozen=True)
class Bare:
    """No isolation: for trusted code, and for argv of one's own in front of the command."""

    argv: tuple[str, ...] = ()
    ends_all: bool = False

    def prefix(self, inside: str | None = None, mounts: Sequence[Mounted] = ()) -> list[str]:
        """``argv``; other paths than the machine's are refused."""
        if inside is not None or any(str(mount.source) != mount.target for mount in mounts):
            raise EvaluatorError(
                "these tests need a sandbox that can mount folders: set rollout.sandbox=bubblewrap"
            )
        return list(self.argv)


BARE = Bare()


@dataclass(frozen=True)
class TestReport:
    """What the hidden tests found."""

    __test__ = False

    passed: int
    total: int
    log: str
    """A few lines for people."""
    timed_out: bool
    """The evaluation's own time limit ended it; tests that did not run count as failed."""
    reward: float | None = None
    """In [0, 1], of a format that defines it otherwise than as passed / total."""
