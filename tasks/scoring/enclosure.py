"""The run's sandbox, as the tests of a workspace use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tasks.problems.evaluation import EvaluatorError, Mounted
from tasks.rollout.sandboxes.cgroup import make_group
from tasks.rollout.sandboxes.limits import Limits
from tasks.rollout.sandboxes.sandbox import Mount, Room, Sandbox


class RoomEnclosure:
    """Commands in a room of its own, without network. ``close`` must be called in every case.

    Args:
        folder: belongs to this evaluation; its folder ``workspace`` is the workspace.
        limits: memory and processes of each command with all that it starts, where there are
            control groups. A command sets further limits itself.

    Raises:
        OSError: a control group can't be made.
    """

    def __init__(self, sandbox: Sandbox, folder: Path, limits: Limits) -> None:
        self.room = Room(folder, network=False)
        self._sandbox = sandbox
        self._group = make_group(limits)

    def close(self) -> None:
        """End whatever still runs.

        Raises:
            OSError: something could not be killed.
        """
        if self._group is not None:
            self._group.end()

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
            return self._sandbox.prefix(self.room, self._group)
        room = replace(
            self.room,
            inside=inside or self.room.inside,
            mounts=tuple(Mount(one.source, one.target, one.writable) for one in mounts),
        )
        return self._sandbox.prefix(room, self._group)
