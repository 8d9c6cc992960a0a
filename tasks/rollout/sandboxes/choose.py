"""The sandbox that a configuration names."""

from __future__ import annotations

from configs.problems import SandboxKind
from tasks.rollout.sandboxes.bubblewrap import Bubblewrap
from tasks.rollout.sandboxes.container import Container
from tasks.rollout.sandboxes.process import PlainProcess
from tasks.rollout.sandboxes.sandbox import Sandbox


def make_sandbox(kind: SandboxKind, image: str = "") -> Sandbox:
    """The sandbox of that kind.

    Args:
        image: of a container.

    Raises:
        SandboxError: it does not work on this machine.
    """
    if kind is SandboxKind.BUBBLEWRAP:
        return Bubblewrap()
    if kind is SandboxKind.PROCESS:
        return PlainProcess()
    return Container(kind.value, image)
