"""The command line of a container engine. No engine is needed: a program that notes its arguments
stands for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tasks.rollout.sandboxes.container import Container
from tasks.rollout.sandboxes.limits import Limits
from tasks.rollout.sandboxes.sandbox import Mount, Room, SandboxError

LIMITS = Limits(memory_mb=100, file_mb=2, cpu_s=3, processes=5, disk_mb=7, cores=0.5)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


@pytest.fixture
def room() -> Iterator[Room]:
    with tempfile.TemporaryDirectory() as folder:  # short: it holds a Unix socket
        (Path(folder) / "workspace").mkdir()
        yield Room(Path(folder), limits=LIMITS)


def values(argv: list[str], flag: str) -> list[str]:
    return [value for name, value in pairwise(argv) if name == flag]


def test_a_command_with_a_model(engine: Path, room: Room) -> None:
    container = Container("docker", "image:1")
    gate = container.make_gate(room)
    try:
        launch = container.launch(room, ["harness"], {"A": "b"}, None, gate, None)
    finally:
        gate.close()
    argv = launch.argv
    options, command = argv[: argv.index("image:1")], argv[argv.index("image:1") + 1 :]
    assert options[:2] == [str(engine), "run"]
    assert values(options, "--network") == ["none"]
    assert values(options, "--cap-drop") == ["ALL"]
    assert "--read-only" in options
    assert values(options, "--memory") == values(options, "--memory-swap") == ["100m"]
    assert values(options, "--pids-limit") == ["5"]
    assert values(options, "--cpus") == ["0.5"]
    assert {"fsize=2097152", "cpu=3", "core=0"} == set(values(options, "--ulimit"))
    assert any(
        value.startswith("/workspace:") and "size=7m" in value
        for value in values(options, "--tmpfs")
    )
    assert "A=b" in values(options, "--env")
    assert command[1:4] == ["-I", "-S", "/run/gyre/entry.pyc"]
    assert command[-2:] == ["--", "harness"]
    (name,) = values(options, "--name")
    assert container.ending(room) == [str(engine), "rm", "--force", "--volumes", name]
    assert "A" not in launch.environment


def test_a_command_of_an_evaluation(engine: Path, room: Room) -> None:
    mount = Mount(Path("/tests"), "/inside/tests")
    with_mount = Room(room.folder, inside="/app", mounts=(mount,))
    argv = Container("docker", "image:1").prefix(with_mount)
    assert argv[-1] == "image:1"
    assert values(argv, "--workdir") == ["/app"]
    volumes = values(argv, "--volume")
    assert f"{room.workspace}:/app" in volumes and "/tests:/inside/tests:ro" in volumes


def test_what_is_missing_is_said(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match=r"rollout\.image"):
        Container("docker", "")
    with pytest.raises(SandboxError, match="no program podman"):
        Container("podman", "image:1")
    engine.write_text("#!/bin/sh\necho not running >&2\nexit 1\n")
    with pytest.raises(SandboxError, match="not running"):
        Container("docker", "image:1")
