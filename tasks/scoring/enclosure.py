"""The run's sandbox, as the tests of a workspace use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tasks.problems.evaluation import EvaluatorError, Mounted
from tasks.rollout.sandboxes.sandbox import Mount, Room, Sandbox


class RoomEnclosure:
    """Commands in a room of its own, without network.

    Args:
        folder: belongs to this evaluation; its folder ``workspace`` is the workspace.
    """

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.room = Room(folder, network=False)
        self._sandbox = sandbox

    @property
    def ends_all(self) -> bool:
        return self._sandbox.ends_all

    def prefix(self, inside: str | None = None, mounts: Sequence[Mounted] = ()) -> list[str]:
        """Argv of the sandbox.

        Raises:
            EvaluatorError: the sandbox can't show folders at other paths.
        """
        if not self.ends_all:
            moved = [mount for mount in mounts if str(mount.source) != mount.target]
            if inside is not None or moved:
                raise EvaluatorError(
                    "these tests need a sandbox that can mount folders: set "
                    "rollout.sandbox=bubblewrap"
                )
            return self._sandbox.prefix(self.room)
        room = replace(
            self.room,
            inside=inside or self.room.inside,
            mounts=tuple(Mount(one.source, one.target, one.writable) for one in mounts),
        )
        return self._sandbox.prefix(room)
