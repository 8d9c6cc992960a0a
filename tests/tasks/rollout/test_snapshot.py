"""Workspaces go into storage and come back equal, and nothing outside goes with them."""

from __future__ import annotations

import os
import socket
import stat
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rollout.snapshot import CACHES, SECRETS, SnapshotError, freeze, remove_tree, thaw

LIMIT = 1 << 20

_names = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=12
).filter(lambda name: name not in {".", "..", *CACHES, *SECRETS} and not name.endswith(".pyc"))
_files = st.tuples(st.binary(max_size=300), st.sampled_from([0o644, 0o600, 0o755, 0o400]))
_trees = st.recursive(
    st.dictionaries(_names, _files, max_size=4),
    lambda below: st.dictionaries(_names, _files | below, max_size=4),
    max_leaves=12,
)


def build(folder: Path, tree: dict) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in tree.items():
        path = folder / name
        if isinstance(value, dict):
            build(path, value)
        else:
            path.write_bytes(value[0])
            path.chmod(value[1])


def seen(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = (mode, path.read_bytes() if path.is_file() else None)
    return found


@settings(max_examples=60, deadline=None)
@given(_trees)
def test_round_trip(tree: dict) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, copy = Path(temporary, "a"), Path(temporary, "b")
        build(folder, tree)
        frozen = freeze(folder, LIMIT)
        assert frozen.left_out == ()
        thaw(frozen.data, copy, LIMIT)
        assert seen(copy) == seen(folder)
        assert freeze(copy, LIMIT).data == frozen.data


def test_caches_and_secrets_are_left_out_and_secrets_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    for name in (*CACHES, *SECRETS):
        (folder / "package" / name).mkdir(parents=True)
        (folder / "package" / name / "data").write_text("x")
    (folder / "package" / "module.pyc").write_bytes(b"x")
    (folder / "package" / "module.py").write_text("x = 1")
    frozen = freeze(folder, LIMIT)
    thaw(frozen.data, tmp_path / "b", LIMIT)
    kept = {str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*")}
    assert kept == {"package", "package/module.py"}
    said = {f"package/{name}: may hold a secret" for name in SECRETS}
    assert set(frozen.left_out) == said


def test_links_that_stay_inside_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    build(folder, {"d": {"e": {"f": (b"x", 0o644)}}})
    (folder / "link").symlink_to("d/e/f")
    (folder / "d" / "up").symlink_to("../link")
    (folder / "dangling").symlink_to("not/there")
    thaw(freeze(folder, LIMIT).data, tmp_path / "b", LIMIT)
    assert seen(tmp_path / "b") == seen(folder)


def test_nothing_outside_is_kept(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden tests")
    folder = tmp_path / "a"
    build(folder, {"x": {"y": {}}, "good": (b"1", 0o644)})
    (folder / "absolute").symlink_to(secret)
    (folder / "relative").symlink_to("../secret")
    (folder / "x" / "y" / "top").symlink_to("../..")
    (folder / "chain").symlink_to("x/y/top/../secret")
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        frozen = freeze(folder, LIMIT)
    assert b"hidden" not in zstandard.decompress(frozen.data)
    thaw(frozen.data, tmp_path / "b", LIMIT)
    assert set(seen(tmp_path / "b")) == {"good", "x", "x/y", "x/y/top"}
    assert len(frozen.left_out) == 5


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    build(folder, {"a": (b"1" * 600, 0o644), "b": (b"2" * 600, 0o644), "c": (b"3" * 300, 0o644)})
    with open(folder / "sparse", "wb") as file:
        file.truncate(1 << 40)
    frozen = freeze(folder, 1000)
    thaw(frozen.data, tmp_path / "b", 1000)
    assert set(seen(tmp_path / "b")) == {"a", "c"}
    assert [text.split(":")[0] for text in frozen.left_out] == ["b", "sparse"]


def test_forbidden_modes_do_not_hide_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    build(folder, {"d": {"f": (b"x", 0o000)}})
    (folder / "d").chmod(0)
    frozen = freeze(folder, LIMIT)
    thaw(frozen.data, tmp_path / "b", LIMIT)
    (tmp_path / "b" / "d").chmod(0o700)
    assert (tmp_path / "b" / "d" / "f").stat().st_size == 1


def _archive(*entries: tuple[str, bytes, str]) -> bytes:
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, link in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            tar.addfile(info)
    return zstandard.compress(out.getvalue())


@pytest.mark.parametrize(
    "data",
    [
        b"not zstandard",
        zstandard.compress(b"not a tar archive" * 100),
        _archive(("../evil", tarfile.REGTYPE, "")),
        _archive(("/evil", tarfile.REGTYPE, "")),
        _archive(("a", tarfile.LNKTYPE, "/etc/passwd")),
        _archive(("a", tarfile.CHRTYPE, "")),
        _archive(("a", tarfile.SYMTYPE, ".."), ("a/evil", tarfile.REGTYPE, "")),
        zstandard.compress(bytes(200 << 20)),
    ],
    ids=["raw", "no-tar", "up", "absolute", "hard-link", "device", "through-link", "bomb"],
)
def test_a_forged_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError):
        thaw(data, tmp_path / "deep" / "b", LIMIT)
    assert not (tmp_path / "deep" / "evil").exists()


def test_a_forged_link_to_the_outside_is_not_made(tmp_path: Path) -> None:
    links = [("up", "../../x"), ("absolute", "/etc"), ("a", "b"), ("b", "../x"), ("in", "good")]
    data = _archive(
        *((name, tarfile.SYMTYPE, target) for name, target in links), ("good", tarfile.REGTYPE, "")
    )
    thaw(data, tmp_path / "deep" / "b", LIMIT)
    assert set(seen(tmp_path / "deep" / "b")) == {"good", "in"}


def test_caches_and_secrets_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    cache = {"m.cpython-311.pyc": (b"x", 0o644)}
    build(
        folder,
        {
            ".git": {"HEAD": (b"ref: refs/heads/main", 0o644)},
            "m.py": (b"x = 1", 0o644),
            "m.pyc": (b"x", 0o644),
            "sub": {"__pycache__": cache, ".ssh": {"id": (b"key", 0o600)}},
            ".netrc": (b"password", 0o600),
        },
    )
    frozen = freeze(folder, LIMIT)
    thaw(frozen.data, tmp_path / "b", LIMIT)
    assert set(seen(tmp_path / "b")) == {".git", ".git/HEAD", "m.py", "sub"}
    assert [text.split(":")[0] for text in frozen.left_out] == [".netrc", "sub/.ssh"]


def test_equal_workspaces_have_one_digest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(tmp_path / name, {"d": {"f": (b"x", 0o644)}})
    os.utime(tmp_path / "b" / "d" / "f", (1, 1))
    build(tmp_path / "c", {"d": {"f": (b"x", 0o755)}})
    digests = [freeze(tmp_path / name, LIMIT).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_links_that_led_through_what_is_left_out_do_not_spoil_the_rest(tmp_path: Path) -> None:
    """Inside in the workspace, outside without the link that is left out: not a reason to fail."""
    folder = tmp_path / "a"
    deep = {"e": {"f": {"g": {}}}}
    build(folder, {"d": deep, "good": (b"1", 0o644)})
    (folder / ".cache").symlink_to("d/e/f/g")
    (folder / "link").symlink_to(".cache/../../../../good")
    frozen = freeze(folder, LIMIT)
    thaw(frozen.data, tmp_path / "b", LIMIT)
    assert "good" in seen(tmp_path / "b")
    assert "link" not in seen(tmp_path / "b")


def test_long_links_do_not_make_a_snapshot_unreadable(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    build(folder, {"good": (b"1", 0o644)})
    for number in range(2000):
        (folder / f"l{number}").symlink_to("./" * 2000 + "good")
    frozen = freeze(folder, 1000)
    thaw(frozen.data, tmp_path / "b", 1000)
    assert set(seen(tmp_path / "b")) == {"good"}


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    home = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        for _ in range(1050):
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.fchdir(home)
        os.close(home)
    assert freeze(folder, LIMIT).left_out != ()
    remove_tree(folder)
    assert not folder.exists()
