"""Folders of exported weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cells.host.exports import Exports


def make(tmp_path: Path, memory: Path, root: str = "root") -> Exports:
    policy = tmp_path / "policy"
    policy.mkdir(exist_ok=True)
    (policy / "model.safetensors").write_bytes(b"x" * 1000)
    scratch = tmp_path / "scratch"
    return Exports(
        root=root,
        run_id="a/b c",
        cell="a",
        scratch=scratch,
        policy=policy,
        version=2,
        memory=memory,
    )


def test_memory_is_used_where_it_exists(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    exports = make(tmp_path, memory)
    assert exports.folder.parent == memory
    exports.close()
    assert not exports.folder.exists()
    assert make(tmp_path, tmp_path / "none").folder == tmp_path / "scratch"


def test_the_remains_of_a_killed_host_are_removed_by_any_other(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    living, killed = make(tmp_path, memory), make(tmp_path, memory, root="other")
    for exports in (living, killed):
        exports.fresh(3).mkdir()
    killed._lock.close()  # what the kernel does when its owner dies
    make(tmp_path, memory, root="third")
    assert (living.folder / "v3").exists()
    assert not killed.folder.exists()


def test_a_second_host_of_a_cell_is_refused(tmp_path: Path) -> None:
    first = make(tmp_path, tmp_path / "none")
    first.fresh(1).mkdir()
    with pytest.raises(BlockingIOError):
        make(tmp_path, tmp_path / "none")
    assert (first.folder / "v1").exists()
    first.close()
    assert not make(tmp_path, tmp_path / "none").fresh(1).exists()


def test_what_an_engine_started_with_is_kept_and_nothing_else_is_made_up(tmp_path: Path) -> None:
    exports = make(tmp_path, tmp_path / "none")
    exports.fresh(5).mkdir()
    assert exports.kept(2) == tmp_path / "policy"
    assert exports.kept(5) == exports.folder / "v5"
    assert exports.kept(4) is None


def test_a_half_written_version_is_not_written_into(tmp_path: Path) -> None:
    exports = make(tmp_path, tmp_path / "none")
    exports.fresh(1).mkdir()
    (exports.folder / "v1" / "half").touch()
    assert not exports.fresh(1).exists()


def test_too_little_room_means_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=10, used=9, free=1)
    monkeypatch.setattr("cells.host.exports.shutil.disk_usage", lambda path: full)
    memory = tmp_path / "memory"
    memory.mkdir()
    assert make(tmp_path, memory).folder == tmp_path / "scratch"
