"""What a sandbox is, and how a run gets its own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.problems import SandboxKind


class SandboxError(RuntimeError):
    """A sandbox can't be had on this machine; the text says what to install or to set."""


@dataclass(frozen=True)
class ProcessLimits:
    """Bounds of every single process inside."""

    memory_mb: int
    """Address space."""
    file_mb: int
    """Largest file that it may write."""
    cpu_s: int
    """Processor time."""


INSIDE = "/workspace"
"""Where the workspace is seen inside, unless a room says otherwise: the same in every execution, so
that prompts that name it share a prefix."""


@dataclass(frozen=True)
class Mount:
    """A file or folder that is seen at another path inside."""

    source: Path
    target: str
    """Absolute path inside."""
    writable: bool = False


@dataclass(frozen=True)
class Room:
    """The place that a command gets.

    Args:
        folder: belongs to this command alone; its folder ``workspace`` is the working folder.
        readable: further files and folders that it may read, at the same paths.
        network: whether it may reach the machine's network.
        limits: of its processes; None when the command limits itself.
        inside: absolute path at which the workspace is seen, and where the command starts.
        mounts: further files and folders at other paths. Only for sandboxes that isolate.
    """

    folder: Path
    readable: tuple[Path, ...] = ()
    network: bool = False
    limits: ProcessLimits | None = None
    inside: str = INSIDE
    mounts: tuple[Mount, ...] = ()

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"


class Sandbox(Protocol):
    """Makes commands that run inside. One object serves many rooms."""

    @property
    def wrappers(self) -> int:
        """Processes of the sandbox itself between the one that is started and the command."""
        ...

    @property
    def ends_all(self) -> bool:
        """Whether the kernel ends everything inside together with the command."""
        ...

    def prefix(self, room: Room, info: int | None = None) -> list[str]:
        """Argv that goes in front of a command; the command's working folder is the workspace.

        Args:
            info: inherited file descriptor to which JSON with the key ``child-pid``, the process
                whose end is the end of everything inside, is written at the start. Only for
                sandboxes with ``wrappers``.
        """
        ...

    def environment(self, room: Room) -> dict[str, str]:
        """The whole environment of a command, but for what the command itself needs."""
        ...


def make_sandbox(kind: SandboxKind) -> Sandbox:
    """The sandbox of that kind.

    Raises:
        SandboxError: it does not work on this machine.
    """
    from tasks.rollout.sandboxes.bubblewrap import Bubblewrap
    from tasks.rollout.sandboxes.process import PlainProcess

    return Bubblewrap() if kind is SandboxKind.BUBBLEWRAP else PlainProcess()


def python_executable() -> str:
    """The interpreter behind a virtual environment's link; it starts fastest."""
    return os.path.realpath(sys.executable)


def limit_command(limits: ProcessLimits | None, processes: int | None) -> list[str]:
    """Argv of ``prlimit`` that puts limits on the command after it."""
    if limits is None:
        return []
    argv = [
        "prlimit",
        f"--as={limits.memory_mb << 20}",
        f"--fsize={limits.file_mb << 20}",
        f"--cpu={limits.cpu_s}",
        "--core=0",
    ]
    if processes is not None:
        argv.append(f"--nproc={processes}")
    return [*argv, "--"]
