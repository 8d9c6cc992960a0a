"""A released client as a harness: unmodified, told where its model is and how much it may use."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tasks.problems.source import Problem
from tasks.rollout.harnesses.command import Command, HarnessError
from tasks.rollout.harnesses.packages import Package
from tasks.rollout.sessions import Endpoint

MODEL = "policy"
"""The name of the model that clients are given. The gateway accepts any."""


@dataclass(frozen=True)
class Budget:
    """What a client is told about its limits.

    Args:
        turns: most model calls of the main agent, where the client can count them.
        compact_at: tokens of prompt and output after which it compacts its history.
        context: tokens of the policy's context.
        max_tokens: most tokens of one reply.
        tool_s: longest time of one command.
        call_s: longest time of a model call.
    """

    turns: int
    compact_at: int
    context: int
    max_tokens: int
    tool_s: float
    call_s: float


class Client(ABC):
    """One client. A subclass says what is installed and how it is started; its docstring, what it
    can't be told.

    Args:
        folder: where ``package`` is installed.
    """

    name: ClassVar[str]
    versions: ClassVar[tuple[str, ...]]
    """With a lock each; the first is taken unless ``harness.version`` says otherwise."""

    def __init__(self, folder: Path, version: str, budget: Budget) -> None:
        self.folder = folder
        self.version = version
        self.budget = budget

    @classmethod
    @abstractmethod
    def package(cls, version: str) -> Package:
        """What has to be installed."""

    @abstractmethod
    def program(self) -> tuple[str, ...]:
        """The installed program, to which arguments can be added."""

    @abstractmethod
    def start(self, endpoint: Endpoint, instruction: Path) -> Command:
        """The command for an instruction in a file; ``readable`` without what every client reads.

        ``endpoint.base_url`` ends in ``/v1``.
        """

    def version_argv(self) -> tuple[str, ...]:
        """The command that prints the version."""
        return (*self.program(), "--version")

    def command(self, problem: Problem, endpoint: Endpoint, folder: Path) -> Command:
        """As ``Harness`` says."""
        instruction = folder / "instruction.txt"
        instruction.write_text(problem.instruction, encoding="utf-8")
        made = self.start(endpoint, instruction)
        return Command(
            argv=made.argv,
            environment=made.environment,
            readable=(self.folder, instruction, *made.readable),
        )

    @classmethod
    def choose_version(cls, wanted: str | None) -> str:
        """A version that has a lock.

        Raises:
            HarnessError: there is none of that name.
        """
        if wanted is None:
            return cls.versions[0]
        if wanted not in cls.versions:
            raise HarnessError(
                f"harness.version {wanted!r} of {cls.name}: there are {', '.join(cls.versions)}"
            )
        return wanted


def reading(file: Path, argv: tuple[str, ...]) -> tuple[str, ...]:
    """A command that reads a file as its input: instructions can be longer than an argument."""
    return ("/bin/sh", "-c", f"exec {shlex.join(argv)} < {shlex.quote(str(file))}")


def platform_folder(modules: Path, prefix: str) -> Path:
    """The package with the binary for this machine, of which npm installs one.

    Args:
        prefix: of the packages' names, such as ``@scope/name-linux-``.

    Raises:
        HarnessError: there is none.
    """
    found = sorted(modules.glob(f"{prefix}*"))
    plain = [path for path in found if not path.name.endswith(("-musl", "-baseline"))]
    if not plain:
        raise HarnessError(f"{modules}: no {prefix}*: the client has no build for this machine")
    return plain[0]
