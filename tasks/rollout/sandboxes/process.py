"""No isolation: a plain process, for machines without namespaces."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.rollout.sandboxes.cgroup import ControlGroup
from tasks.rollout.sandboxes.gate import Gate
from tasks.rollout.sandboxes.sandbox import Launch, Room, limit_command, process_limits

_log = logging.getLogger(__name__)
_warned = False


class PlainProcess:
    """The agent's commands run as the run's own user, on the machine itself. Says so once."""

    wrappers = 0
    ends_all = False
    isolates = False

    def __init__(self) -> None:
        global _warned
        if not _warned:
            _warned = True
            _log.warning(
                "rollout.sandbox=process: agents run WITHOUT ISOLATION. What they execute can read "
                "and change everything that this user can, hidden tests and rewards included, and "
                "has the network. Use it only for agents and problems that you trust."
            )

    def make_gate(self, room: Room) -> None:
        return None

    def prefix(self, room: Room, group: ControlGroup | None = None) -> list[str]:
        # The kernel ends the command with the thread that started it; what the command leaves
        # behind is found by its control group, or by its environment and working folder.
        limits = process_limits(room.limits, group)
        # The count of processes is the user's here, whose other work it must not stop.
        limits.pop("nproc", None)
        entering = [] if group is None else group.entering()
        return [*entering, "setpriv", "--pdeathsig", "KILL", *limit_command(limits)]

    def environment(self, room: Room) -> dict[str, str]:
        for name in ("home", "tmp"):
            os.makedirs(room.folder / name, exist_ok=True)
        return {
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(room.folder / "home"),
            "TMPDIR": str(room.folder / "tmp"),
            "LANG": "C.UTF-8",
        }

    def launch(
        self,
        room: Room,
        command: Sequence[str],
        environment: Mapping[str, str],
        group: ControlGroup | None,
        gate: Gate | None,
        info: int | None,
    ) -> Launch:
        argv = [*self.prefix(room, group), *command]
        return Launch(argv, {**self.environment(room), **environment})

    def ending(self, room: Room) -> None:
        return None
