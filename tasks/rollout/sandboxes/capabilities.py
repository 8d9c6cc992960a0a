"""Which sandboxes and which of their limits hold on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from configs.problems import SandboxKind
from tasks.rollout.sandboxes.cgroup import hierarchies
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sandboxes.sandbox import SandboxError


@dataclass(frozen=True)
class Capability:
    """Something that a sandbox needs or limits."""

    name: str
    holds: bool
    how: str
    """What holds it; otherwise what is missing, or what holds less in its place."""


def capabilities() -> tuple[Capability, ...]:
    """What this machine can do, found out by trying. Takes up to a second."""
    return (*(_kind(kind) for kind in SandboxKind), *_limits())


def _kind(kind: SandboxKind) -> Capability:
    if kind is SandboxKind.PROCESS:
        return Capability(kind.value, False, "works everywhere and isolates nothing")
    try:
        make_sandbox(kind, image="any")
    except SandboxError as error:
        return Capability(kind.value, False, str(error))
    return Capability(kind.value, True, "works")


def _limits() -> tuple[Capability, ...]:
    found = {
        name: f"control groups version {2 if tree.unified else 1} in {tree.parent}"
        for tree in hierarchies()
        for name in tree.controllers
    }
    # The kernel never counts the processes of the machine's root.
    counted = "the user's limit of processes, counted in the sandbox alone"
    processes = found.get("pids", counted if os.getuid() else "")
    return (
        Capability("memory of a sandbox", "memory" in found, found.get("memory", _EACH)),
        Capability("processes of a sandbox", bool(processes), processes or _NO_GROUPS),
        Capability("processors of a sandbox", "cpu" in found, found.get("cpu", _NO_GROUPS)),
        Capability("disk of a sandbox", True, "size of its folders, which are in memory"),
        Capability("size of a file, processor time", True, "limits of each process"),
    )


_NO_GROUPS = "this user can't make control groups: run the host in a delegated one"
_EACH = f"only the address space of each process; {_NO_GROUPS}"
