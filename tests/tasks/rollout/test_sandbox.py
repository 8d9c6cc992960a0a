"""What is said when a sandbox can't be had, and that the plain one says what it is."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.problems import SandboxKind
from tasks.rollout.sandboxes import bubblewrap, process
from tasks.rollout.sandboxes.bubblewrap import Bubblewrap
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sandboxes.limits import Limits
from tasks.rollout.sandboxes.sandbox import Room, Sandbox, SandboxError

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")


@pytest.fixture
def forget() -> Iterator[None]:
    bubblewrap._works.cache_clear()
    yield
    bubblewrap._works.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "room" / "workspace").mkdir(parents=True)
    return tmp_path / "room"


def run(sandbox: Sandbox, room: Room, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*sandbox.prefix(room), *command],
        env=sandbox.environment(room),
        cwd=room.workspace,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_missing(forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*rollout\.sandbox=process"):
        make_sandbox(SandboxKind.BUBBLEWRAP)


def test_forbidden(forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho no permissions to create namespace >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxError, match=r"no permissions.*userns_clone"):
        make_sandbox(SandboxKind.BUBBLEWRAP)


def test_the_plain_process_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_warned", False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            make_sandbox(SandboxKind.PROCESS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "WITHOUT ISOLATION" in caplog.text


@pytest.mark.parametrize(
    "kind", [pytest.param(SandboxKind.BUBBLEWRAP, marks=needs_bwrap), "process"]
)
def test_limits_bind_and_the_interpreter_runs(kind: SandboxKind, folder: Path) -> None:
    sandbox = make_sandbox(SandboxKind(kind))
    room = Room(folder, limits=Limits(memory_mb=512, file_mb=1, cpu_s=1))
    done = run(sandbox, room, sys.executable, "-I", "-S", "-c", "print(bytearray(1 << 30)[0])")
    assert "MemoryError" in done.stderr
    done = run(sandbox, room, "sh", "-c", "head -c 2000000 /dev/zero > big; echo $?")
    assert done.stdout != "0\n"
    assert (folder / "workspace" / "big").stat().st_size == 1 << 20
    done = run(sandbox, room, "sh", "-c", "while :; do :; done")
    assert done.returncode in (-9, 137, -24, 152)


@needs_bwrap
def test_network_and_readable_paths(folder: Path, tmp_path: Path) -> None:
    sandbox = Bubblewrap()
    given = tmp_path / "given"
    given.write_text("given")
    devices = ("sh", "-c", "tail -n +3 /proc/net/dev | cut -d: -f1")
    alone = run(sandbox, Room(folder), *devices)
    assert alone.stdout.split() == ["lo"]
    shared = run(sandbox, Room(folder, network=True), *devices)
    here = subprocess.run(devices, capture_output=True, text=True)
    assert shared.stdout == here.stdout
    assert run(sandbox, Room(folder), "cat", str(given)).returncode != 0
    assert run(sandbox, Room(folder, readable=(given,)), "cat", str(given)).stdout == "given"
    assert run(sandbox, Room(folder, readable=(given,)), "touch", str(given)).returncode != 0


@needs_bwrap
def test_python_is_seen_where_it_lies_in_a_place_that_is_empty_inside(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as prefix:
        (Path(prefix) / "module").write_text("of this environment")
        monkeypatch.setattr(sys, "prefix", prefix)
        done = run(Bubblewrap(), Room(folder), "cat", f"{prefix}/module")
        assert done.stdout == "of this environment"
        assert run(Bubblewrap(), Room(folder), "ls", "/tmp").stdout.split() == [Path(prefix).name]


@needs_bwrap
def test_the_environment_is_the_sandboxes_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    done = run(Bubblewrap(), Room(folder), "env")
    names = {line.split("=")[0] for line in done.stdout.splitlines()}
    assert names == {"PATH", "HOME", "TMPDIR", "LANG", "PWD"}
