"""Isolation by a container engine: docker, or podman with the same commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from tasks.rollout.sandboxes.cgroup import ControlGroup
from tasks.rollout.sandboxes.gate import Gate
from tasks.rollout.sandboxes.program import program
from tasks.rollout.sandboxes.sandbox import (
    PORT,
    Launch,
    Room,
    SandboxError,
    python_executable,
)

LABEL = "gyre.folder"
TEMPORARY_MB = 64
_START_LIMIT_S = 60
_RUN = "/run/gyre"


class Container:
    """Each command in a container of its own: no network, no capabilities, read-only root, the
    workspace and the temporary folders in memory. Limits are the engine's.

    The image needs no Python: this interpreter's installation is mounted where it lies here, so the
    image has to have a C library that it runs with.

    Args:
        engine: ``docker`` or ``podman``.
        image: what the containers are made from.

    Raises:
        SandboxError: there is no such program, or its engine does not answer.
    """

    wrappers = 0
    ends_all = True
    isolates = True

    def __init__(self, engine: str, image: str) -> None:
        self._engine = _works(engine)
        if not image:
            raise SandboxError(f"rollout.sandbox is {engine}: set rollout.image")
        self._image = image

    def make_gate(self, room: Room) -> Gate:
        return Gate(room.folder / "gate")

    def prefix(self, room: Room, group: ControlGroup | None = None) -> list[str]:
        argv = [*self._run(room), "--interactive", "--volume", f"{room.workspace}:{room.inside}"]
        return [*argv, self._image]

    def environment(self, room: Room) -> dict[str, str]:
        # Of the engine's client; the command's own goes with its arguments.
        names = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "XDG_RUNTIME_DIR")
        return {name: os.environ[name] for name in names if name in os.environ}

    def launch(
        self,
        room: Room,
        command: Sequence[str],
        environment: Mapping[str, str],
        group: ControlGroup | None,
        gate: Gate | None,
        info: int | None,
    ) -> Launch:
        assert gate is not None and gate.path is not None
        first = room.folder / "entry.pyc"
        first.write_bytes(program())
        argv = self._run(room)
        argv += ["--volume", f"{first}:{_RUN}/entry.pyc:ro"]
        argv += ["--volume", f"{gate.path}:{_RUN}/gate"]
        argv += ["--tmpfs", f"{room.inside}:{_size(room)},mode=0700"]
        for name, value in {"HOME": "/home", "TMPDIR": "/tmp", **environment}.items():
            argv += ["--env", f"{name}={value}"]
        argv += [self._image, python_executable(), "-I", "-S", f"{_RUN}/entry.pyc"]
        argv += [f"{_RUN}/gate", str(PORT), "", "--", *command]
        return Launch(argv, self.environment(room))

    def ending(self, room: Room) -> list[str]:
        return [self._engine, "rm", "--force", "--volumes", _name(room)]

    def _run(self, room: Room) -> list[str]:
        argv = [self._engine, "run", "--rm", "--init", "--name", _name(room)]
        argv += ["--label", f"{LABEL}={room.folder.parent}", "--workdir", room.inside]
        argv += ["--network", "bridge" if room.network else "none"]
        argv += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        argv += ["--user", f"{os.getuid()}:{os.getgid()}"]
        for place in ("/tmp", "/home"):
            argv += ["--tmpfs", f"{place}:{_size(room)}"]
        if room.limits:
            memory = f"{room.limits.memory_mb}m"
            # The same for memory with swap, or the engine allows as much swap again.
            argv += ["--memory", memory, "--memory-swap", memory]
            argv += ["--pids-limit", str(room.limits.processes)]
            argv += ["--ulimit", f"fsize={room.limits.file_mb << 20}"]
            argv += ["--ulimit", f"cpu={room.limits.cpu_s}", "--ulimit", "core=0"]
            if room.limits.cores:
                argv += ["--cpus", str(room.limits.cores)]
        for path in (Path(sys.base_prefix), *room.readable):
            argv += ["--volume", f"{path}:{path}:ro"]
        for mount in room.mounts:
            mode = "rw" if mount.writable else "ro"
            argv += ["--volume", f"{mount.source}:{mount.target}:{mode}"]
        return argv


def _size(room: Room) -> str:
    size = room.limits.disk_mb if room.limits else TEMPORARY_MB
    return f"rw,exec,nosuid,nodev,size={size}m"


def _name(room: Room) -> str:
    # Folders of different hosts may have the same name.
    return f"gyre-{blake2b(bytes(room.folder), digest_size=8).hexdigest()}"


def _works(engine: str) -> str:
    """Path of the engine's client; its engine was seen to answer."""
    program_path = shutil.which(engine)
    if program_path is None:
        raise SandboxError(f"rollout.sandbox is {engine}, but there is no program {engine}")
    try:
        done = subprocess.run(
            [program_path, "version"], capture_output=True, timeout=_START_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{engine} can't be started: {error}") from error
    if done.returncode:
        raise SandboxError(
            f"{engine} does not answer: {done.stderr.decode(errors='replace').strip()}; start its "
            f"engine, or set rollout.sandbox=bubblewrap"
        )
    return program_path
