"""Folders of exported weights."""

from __future__ import annotations

from pathlib import Path

from cells.host.exports import Exports


def make(tmp_path: Path, memory: Path, root: str = "root") -> Exports:
    policy = tmp_path / "policy"
    policy.mkdir(exist_ok=True)
    (policy / "model.safetensors").write_bytes(b"x" * 1000)
    scratch = tmp_path / "scratch"
    return Exports(
        root=root, run_id="a/b c", cell="a", scratch=scratch, policy=policy, memory=memory
    )


def test_memory_is_used_where_it_exists(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    exports = make(tmp_path, memory)
    assert exports.folder.parent == memory
    assert make(tmp_path, tmp_path / "none").folder == tmp_path / "scratch"


def test_the_remains_of_a_killed_host_are_removed(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    killed = make(tmp_path, memory)
    killed.fresh(3).mkdir()
    again = make(tmp_path, memory)
    assert again.folder == killed.folder
    assert list(again.folder.iterdir()) == []
    other = make(tmp_path, memory, root="other")
    assert other.folder != again.folder, "a run of the same name in another store"


def test_a_half_written_version_is_not_written_into(tmp_path: Path) -> None:
    exports = make(tmp_path, tmp_path / "none")
    exports.fresh(1).mkdir()
    (exports.folder / "v1" / "half").touch()
    assert not exports.fresh(1).exists()


def test_too_little_room_means_disk(tmp_path: Path, monkeypatch: object) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))  # type: ignore[attr-defined]
    memory = tmp_path / "memory"
    memory.mkdir()
    assert make(tmp_path, memory).folder == tmp_path / "scratch"
