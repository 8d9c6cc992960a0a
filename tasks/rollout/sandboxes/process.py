"""No isolation: a plain process, for machines without namespaces."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from tasks.rollout.sandboxes.sandbox import Room, limit_command

_log = logging.getLogger(__name__)
_warned = False


class PlainProcess:
    """The agent's commands run as the run's own user, on the machine itself. Says so once."""

    wrappers = 0
    ends_all = False

    def __init__(self) -> None:
        global _warned
        if not _warned:
            _warned = True
            _log.warning(
                "rollout.sandbox=process: agents run WITHOUT ISOLATION. What they execute can read "
                "and change everything that this user can, hidden tests and rewards included, and "
                "has the network. Use it only for agents and problems that you trust."
            )

    def prefix(self, room: Room, info: int | None = None) -> list[str]:
        # The kernel ends the command with the thread that started it; what the command leaves
        # behind is found by its environment and working folder.
        return ["setpriv", "--pdeathsig", "KILL", *limit_command(room.limits, None)]

    def environment(self, room: Room) -> dict[str, str]:
        for name in ("home", "tmp"):
            os.makedirs(room.folder / name, exist_ok=True)
        return {
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(room.folder / "home"),
            "TMPDIR": str(room.folder / "tmp"),
            "LANG": "C.UTF-8",
        }
