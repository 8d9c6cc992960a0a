"""Isolation by Linux namespaces through bubblewrap."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tasks.rollout.sandboxes.sandbox import Room, SandboxError, limit_command

TEMPORARY_BYTES = 64 << 20
PROCESSES = 256
_START_LIMIT_S = 20
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_SETTINGS = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/hosts",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)


class Bubblewrap:
    """Own user, process, mount, host-name and (without ``network``) network namespaces. The system
    is read-only, ``/tmp`` and ``/home`` are empty and temporary, only the workspace is the room's.

    Raises:
        SandboxError: bubblewrap is missing or namespaces are not allowed.
    """

    wrappers = 2  # the one that waits outside, and the first process of the namespace
    ends_all = True

    def __init__(self) -> None:
        self._fixed = _fixed_arguments(_works())

    def prefix(self, room: Room, info: int | None = None) -> list[str]:
        argv = list(self._fixed)
        if room.network:
            argv.append("--share-net")
        for path in room.readable:
            argv += ["--ro-bind", str(path), str(path)]
        argv += ["--bind", str(room.workspace), room.inside]
        for mount in room.mounts:
            argv += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target]
        argv += ["--chdir", room.inside, "--remount-ro", "/"]
        if info is not None:
            argv += ["--info-fd", str(info)]
        # Inside, so that the count of processes is the sandbox's own and not the user's. It binds
        # only where the run's user is not root.
        return [*argv, "--", *limit_command(room.limits, PROCESSES)]

    def environment(self, room: Room) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/home/agent",
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
        }


def _fixed_arguments(program: str) -> tuple[str, ...]:
    argv = [program, "--unshare-all", "--die-with-parent", "--new-session"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for place in ("/tmp", "/home"):
        argv += ["--size", str(TEMPORARY_BYTES), "--tmpfs", place]
    argv += ["--dir", "/home/agent"]
    for path in _visible():
        if path.is_symlink() and str(path) in _SYSTEM:
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            argv += ["--ro-bind", str(path), str(path)]
    return tuple(argv)


def _visible() -> Iterable[Path]:
    yield from map(Path, _SYSTEM)
    yield from map(Path, _SETTINGS)
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):
        if not prefix.startswith("/usr"):
            yield Path(prefix)


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
    probe = [*_fixed_arguments(program), "--", "/bin/true"]
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
