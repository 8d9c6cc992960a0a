"""What a sandbox is, and how a run gets its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.rollout.sandboxes.cgroup import ControlGroup
from tasks.rollout.sandboxes.gate import Gate
from tasks.rollout.sandboxes.limits import Limits

INSIDE = "/workspace"
"""Where the workspace is seen inside, unless a room says otherwise: the same in every execution, so
that prompts that name it share a prefix."""

PORT = 8000
"""Where a sandbox with a network of its own finds the gateway, on its loopback device."""


class SandboxError(RuntimeError):
    """A sandbox can't be had on this machine; the text says what to install or to set."""


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
        folder: belongs to this command alone; its folder ``workspace`` is the working folder,
            unless the sandbox makes one of its own.
        readable: further files and folders that it may read, at the same paths.
        network: whether it may reach the machine's network.
        limits: of everything inside; None when the command limits itself.
        inside: absolute path at which the workspace is seen, and where the command starts.
        mounts: further files and folders at other paths. Only for sandboxes that isolate.
        copy_mb: where it is not 0, a command behind ``prefix`` works on a copy of the workspace in
            memory of this size, gone with the command. Bubblewrap only.
    """

    folder: Path
    readable: tuple[Path, ...] = ()
    network: bool = False
    limits: Limits | None = None
    inside: str = INSIDE
    mounts: tuple[Mount, ...] = ()
    copy_mb: int = 0

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"


@dataclass(frozen=True)
class Launch:
    """How a command in a sandbox is started."""

    argv: list[str]
    environment: dict[str, str]
    descriptors: tuple[int, ...] = ()
    """That it inherits."""


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

    @property
    def isolates(self) -> bool:
        """Whether a launched command has a network and a workspace of its own."""
        ...

    def make_gate(self, room: Room) -> Gate | None:
        """Where it isolates, the gate through which a room hands out what is its own. None where
        a command has the machine's network and the room's folder ``workspace``."""
        ...

    def prefix(self, room: Room, group: ControlGroup | None = None) -> list[str]:
        """Argv that goes in front of a command that works in the room's workspace."""
        ...

    def environment(self, room: Room) -> dict[str, str]:
        """The whole environment of such a command, but for what the command itself needs."""
        ...

    def launch(
        self,
        room: Room,
        command: Sequence[str],
        environment: Mapping[str, str],
        group: ControlGroup | None,
        gate: Gate | None,
        info: int | None,
    ) -> Launch:
        """Start of a command that is given a model.

        Args:
            gate: from ``make_gate``.
            info: inherited descriptor to which JSON with the key ``child-pid`` is written at the
                start: the process whose end is the end of everything inside. Where ``wrappers``.
        """
        ...

    def ending(self, room: Room) -> list[str] | None:
        """Command that ends what was launched, where killing the launched process does not."""
        ...


def python_executable() -> str:
    """The interpreter behind a virtual environment's link; it starts fastest."""
    return os.path.realpath(sys.executable)


def process_limits(limits: Limits | None, group: ControlGroup | None) -> dict[str, int]:
    """What has to be set on each process, because no control group does it for all."""
    if limits is None:
        return {}
    held = group.holds if group is not None else frozenset()
    return limits.of_each_process(memory="memory" not in held, processes="pids" not in held)


def limit_command(limits: Mapping[str, int]) -> list[str]:
    """Argv of ``prlimit`` that puts limits on the command after it."""
    if not limits:
        return []
    return ["prlimit", *(f"--{name}={value}" for name, value in limits.items()), "--"]
