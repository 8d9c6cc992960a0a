"""Isolation by Linux namespaces through bubblewrap."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from tasks.rollout.sandboxes.cgroup import ControlGroup
from tasks.rollout.sandboxes.gate import Gate
from tasks.rollout.sandboxes.program import program
from tasks.rollout.sandboxes.sandbox import (
    PORT,
    Launch,
    Room,
    SandboxError,
    limit_command,
    process_limits,
    python_executable,
)

TEMPORARY_MB = 64
_START_LIMIT_S = 20
_ORIGINAL = "/run/workspace"
"""Where a workspace is seen that commands have a copy of."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")
_OWN_SETTINGS = Path(__file__).with_name("etc")
"""Users and hosts as they are inside; the machine's own are nobody's business."""


class Bubblewrap:
    """Own user, process, mount, IPC, host-name and (without ``network``) network namespaces. The
    system is read-only; ``/tmp``, ``/home`` and ``/dev/shm`` are empty and temporary. A launched
    command has its workspace in memory too, with a size that the kernel keeps.

    Raises:
        SandboxError: bubblewrap is missing or namespaces are not allowed.
    """

    wrappers = 2  # the one that waits outside, and the first process of the namespace
    ends_all = True
    isolates = True

    def __init__(self) -> None:
        self._program = _works()

    def make_gate(self, room: Room) -> Gate:
        return Gate()

    def prefix(self, room: Room, group: ControlGroup | None = None) -> list[str]:
        argv = _arguments(self._program, room, group)
        copying: list[str] = []
        if room.copy_mb:
            argv += ["--ro-bind", str(room.workspace), _ORIGINAL]
            argv += ["--size", str(room.copy_mb << 20), "--tmpfs", room.inside]
            # What can't be read is not copied; it could not be read in its place either.
            copying = ["/bin/sh", "-c", f'cp -a {_ORIGINAL}/. . 2>/dev/null; exec "$@"', "sh"]
        else:
            argv += ["--bind", str(room.workspace), room.inside]
        argv += [*_end_of_mounts(room), "--"]
        # Inside, so that the count of processes is the sandbox's own and not the user's.
        return [*argv, *limit_command(process_limits(room.limits, group)), *copying]

    def environment(self, room: Room) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/home/agent",
            "TMPDIR": "/tmp",
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
        assert gate is not None and gate.inside is not None and info is not None
        first = room.folder / "entry.pyc"
        first.write_bytes(program())
        # Without this environment's packages: Gyre itself may be one of them.
        argv = _arguments(self._program, room, group, packages=False)
        argv += ["--ro-bind", str(first), "/run/entry.pyc"]
        argv += [*_in_memory(room.inside, room), *_end_of_mounts(room)]
        argv += ["--info-fd", str(info), "--"]
        limits = ",".join(
            f"{name.upper()}={value}" for name, value in process_limits(room.limits, group).items()
        )
        argv += [python_executable(), "-I", "-S", "/run/entry.pyc"]
        argv += [str(gate.inside), str(PORT), limits, "--", *command]
        return Launch(argv, {**self.environment(room), **environment}, (gate.inside, info))

    def ending(self, room: Room) -> None:
        return None


def _arguments(
    program: str, room: Room, group: ControlGroup | None, *, packages: bool = True
) -> list[str]:
    argv = [] if group is None else group.entering()
    argv += _namespaces(program)
    if room.network:
        argv.append("--share-net")
    # Before all that is shown: Python, or this environment, may itself lie in one of them.
    for place in ("/tmp", "/home", "/dev/shm"):
        argv += _in_memory(place, room)
    argv += _system()
    if packages and sys.prefix != sys.base_prefix:
        argv += ["--ro-bind", sys.prefix, sys.prefix]
    # What lies in /proc/sys belongs to root, so a root inside could write the machine's settings.
    argv += ["--dir", "/home/agent", "--remount-ro", "/dev", "--remount-ro", "/proc"]
    for path in room.readable:
        argv += ["--ro-bind", str(path), str(path)]
    return argv


def _end_of_mounts(room: Room) -> list[str]:
    argv: list[str] = []
    for mount in room.mounts:
        argv += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target]
    return [*argv, "--chdir", room.inside, "--remount-ro", "/"]


def _in_memory(place: str, room: Room) -> list[str]:
    size = room.limits.disk_mb if room.limits else TEMPORARY_MB
    return ["--size", str(size << 20), "--tmpfs", place]


def _namespaces(program: str) -> tuple[str, ...]:
    argv = [program, "--unshare-all", "--die-with-parent", "--new-session"]
    # Of the new user namespace, and root would have them all: with them the read-only mounts and
    # the sizes of the temporary folders could be undone.
    argv += ["--cap-drop", "ALL"]
    return (*argv, "--proc", "/proc", "--dev", "/dev")


@lru_cache(maxsize=1)
def _system() -> tuple[str, ...]:
    argv: list[str] = []
    for path in _visible():
        if path.is_symlink() and str(path) in _SYSTEM:
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            argv += ["--ro-bind", str(path), str(path)]
    for path in sorted(_OWN_SETTINGS.iterdir()):
        argv += ["--ro-bind", str(path), f"/etc/{path.name}"]
    return tuple(argv)


def _visible() -> Iterable[Path]:
    yield from map(Path, _SYSTEM)
    yield from map(Path, _SETTINGS)
    if not sys.base_prefix.startswith("/usr"):
        yield Path(sys.base_prefix)


@lru_cache(maxsize=1)
def _works() -> str:
    """Path of a bubblewrap that was seen to work."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "rollout.sandbox is bubblewrap, but there is no program bwrap: install it "
            "(Debian: apt-get install bubblewrap), or set rollout.sandbox=process, which isolates "
            "nothing"
        )
    probe = [*_namespaces(program), *_system(), "--", "/bin/true"]
    try:
        done = subprocess.run(
            probe, capture_output=True, timeout=_START_LIMIT_S, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"bubblewrap can't be started: {error}") from error
    if done.returncode:
        raise SandboxError(
            f"bubblewrap does not work here: {done.stderr.decode(errors='replace').strip()}; allow "
            f"unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, or "
            f"kernel.apparmor_restrict_unprivileged_userns=0), or set rollout.sandbox=process, "
            f"which isolates nothing"
        )
    return program
