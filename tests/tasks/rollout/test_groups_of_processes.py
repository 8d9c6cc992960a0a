"""Control groups hold what they say, and nothing in them outlives their end."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.rollout.sandboxes import cgroup
from tasks.rollout.sandboxes.capabilities import capabilities
from tasks.rollout.sandboxes.cgroup import Hierarchy, grouped, hierarchies, make_group
from tasks.rollout.sandboxes.limits import Breach, Limits

LIMITS = Limits(memory_mb=64, file_mb=1, cpu_s=10, processes=8)
available = {name for tree in hierarchies() for name in tree.controllers}


def run(group: cgroup.ControlGroup, program: str) -> subprocess.CompletedProcess[str]:
    argv = [*group.entering(), "python3", "-I", "-S", "-c", program]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_nothing_is_left(tmp_path: Path) -> None:
    with grouped(LIMITS) as group:
        if group is None:
            assert not hierarchies()
            return
        daemon = (
            "import os, time\n"
            "if os.fork() == 0:\n"
            "    os.setsid(); os.closerange(0, 9); time.sleep(600)"
        )
        assert run(group, daemon).returncode == 0
        inside = [
            int(pid)
            for _, path in group.places
            for part in path.iterdir()
            if part.is_dir()
            for pid in (part / "cgroup.procs").read_text().split()
        ]
        assert inside
    assert not any(path.exists() for _, path in group.places)
    assert not any(_runs(pid) for pid in inside)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_parts_may_vanish_while_a_group_is_taken_away() -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            group = make_group(LIMITS)
            if group is None:
                return
            for _, path in group.places:
                for part in range(30):
                    (path / str(part)).mkdir()
            for ended in [pool.submit(group.end) for _ in range(4)]:
                ended.result()
            assert not any(path.exists() for _, path in group.places)


def test_processes_and_memory_are_limited() -> None:
    with grouped(LIMITS) as group:
        if group is None:
            return
        if "pids" in available:
            done = run(group, "import os, time\nfor _ in range(9): os.fork() or time.sleep(9)")
            assert "BlockingIOError" in done.stderr
            # Those that are left over do not count against the next command.
            assert run(group, "import os; os.fork()").returncode == 0
            assert Breach.PROCESSES in group.breaches()
        if "memory" in available:
            assert run(group, "x = bytearray(b'x') * (1 << 28)").returncode == -9
            assert Breach.MEMORY in group.breaches()


def test_no_control_groups_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.rollout.sandboxes.capabilities.hierarchies", tuple)
    monkeypatch.setattr(cgroup, "hierarchies", tuple)
    assert make_group(LIMITS) is None
    said = {one.name: one for one in capabilities()}
    assert not said["memory of a sandbox"].holds
    assert "address space" in said["memory of a sandbox"].how
    assert said["processes of a sandbox"].holds == (os.getuid() != 0)


def test_the_files_of_both_versions() -> None:
    limits = Limits(memory_mb=1, file_mb=1, cpu_s=1, processes=7, cores=1.5)
    every = frozenset(("pids", "memory", "cpu"))
    assert Hierarchy(Path("/x"), every, unified=True).settings(limits) == {
        "pids.max": "7",
        "memory.max": str(1 << 20),
        "cpu.max": "150000 100000",
    }
    assert Hierarchy(Path("/x"), every, unified=False).settings(limits) == {
        "pids.max": "7",
        "memory.limit_in_bytes": str(1 << 20),
        "cpu.cfs_quota_us": "150000",
    }


def test_a_machine_with_version_two_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree as systemd delegates it: this process shares its group, so groups go beside it."""
    mount = tmp_path / "cgroup"
    service = mount / "user.slice" / "app.service"
    service.mkdir(parents=True)
    (mount / "user.slice" / "cgroup.controllers").write_text("cpu memory pids\n")
    (mount / "user.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (service / "cgroup.controllers").write_text("cpu memory pids\n")
    # There is no cgroup.subtree_control to write to: the kernel refuses it for a shared group.
    mountinfo, own = tmp_path / "mountinfo", tmp_path / "own"
    mountinfo.write_text(f"30 1 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    own.write_text("0::/user.slice/app.service\n")
    monkeypatch.setattr(cgroup, "_MOUNTS", mountinfo)
    monkeypatch.setattr(cgroup, "_OWN", own)
    hierarchies.cache_clear()
    try:
        (tree,) = hierarchies()
    finally:
        hierarchies.cache_clear()
    assert tree == Hierarchy(
        mount / "user.slice", frozenset(("cpu", "memory", "pids")), unified=True
    )
