"""What a harness is to an execution: a command, and what it needs to read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.problems.source import Problem
from tasks.rollout.sessions import Endpoint


class HarnessError(ValueError):
    """A harness can't be had; the text says what to change, or what to install."""


@dataclass(frozen=True)
class Command:
    """What is run inside the sandbox, with the workspace as working folder."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    readable: tuple[Path, ...]
    """What it needs to read besides the system and its workspace."""


class Harness(Protocol):
    """Makes the command of an execution."""

    def command(self, problem: Problem, endpoint: Endpoint, folder: Path) -> Command:
        """The command for a problem; files that it needs are put into ``folder``."""
        ...
