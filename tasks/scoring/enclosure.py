"""The run's sandbox, as the tests of a workspace use it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tasks.problems.evaluation import EvaluatorError, Mounted
from tasks.rollout.sandboxes.cgroup import make_group
from tasks.rollout.sandboxes.limits import Limits
from tasks.rollout.sandboxes.sandbox import Mount, Room, Sandbox

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RoomEnclosure:
    """Commands in a room of its own, without network. ``close`` must be called in every case.

    Under bubblewrap each command starts on a copy of the workspace in memory, so that the agent's
    code can't fill the machine's disk, and with it the evaluations of others.

    Args:
        folder: belongs to this evaluation; its folder ``workspace`` is the workspace.
        limits: of each command with all that it starts. ``disk_mb`` is what it may write beside
            the workspace's own files, where the sandbox keeps a limit of disk.

    Raises:
        OSError: a control group can't be made.
    """

    def __init__(self, sandbox: Sandbox, folder: Path, limits: Limits) -> None:
        self.room = Room(folder, network=False, limits=limits)
        self._sandbox = sandbox
        self._spare_mb = limits.disk_mb
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
            copy_mb=_size_mb(self.room.workspace) + self._spare_mb,
        )
        return self._sandbox.prefix(room, self._group)


def _size_mb(folder: Path) -> int:
    """Memory that a copy of a folder takes, rounded up."""
    size = 0
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):
                size += os.lstat(f"{where}/{name}").st_size // _PAGE_BYTES + 1
    return size * _PAGE_BYTES // (1 << 20) + 1
