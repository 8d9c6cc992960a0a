"""Task folders on disk: finding them, reading their files, copying what an evaluation needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tasks.problems.source import ProblemSourceError

TEXT_BYTES = 8 << 20
TREE_FILES = 20_000
TREE_BYTES = 1 << 30


def task_folders(path: str, marker: str, source: str) -> dict[str, Path]:
    """Folders below ``path`` that hold the file ``marker``, by their names. ``path`` may be one.

    Raises:
        ProblemSourceError: there is no such folder, or no task in it.
    """
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        raise ProblemSourceError(f"problems.path {root}: no such folder (source {source})")
    if (root / marker).is_file():
        return {root.name: root}
    found = {
        folder.name: folder for folder in sorted(root.iterdir()) if (folder / marker).is_file()
    }
    if not found:
        raise ProblemSourceError(
            f"problems.path {root}: neither it nor a folder in it has a file {marker}, so there is "
            f"no task for source {source}"
        )
    return found


def read_text(path: Path) -> str:
    """The text of a task's file.

    Raises:
        ProblemSourceError: names the file and what is wrong with it.
    """
    try:
        if path.stat().st_size > TEXT_BYTES:
            raise ProblemSourceError(f"{path}: larger than {TEXT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProblemSourceError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProblemSourceError(f"{path}: not UTF-8: {error}") from error


def read_tree(folder: Path) -> tuple[dict[str, bytes], frozenset[str]]:
    """Content of the files below ``folder`` by relative path, and which may be executed.

    Raises:
        ProblemSourceError: a link or a special file, too many or too large files.
    """
    found: dict[str, bytes] = {}
    executable: set[str] = set()
    size = 0
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ProblemSourceError(f"{path}: only files and folders can be part of a workspace")
        if path.is_dir():
            continue
        size += path.stat().st_size
        if len(found) >= TREE_FILES or size > TREE_BYTES:
            raise ProblemSourceError(
                f"{folder}: more than {TREE_FILES} files or {TREE_BYTES} bytes for a workspace"
            )
        name = str(path.relative_to(folder))
        found[name] = path.read_bytes()
        if os.access(path, os.X_OK):
            executable.add(name)
    return found, frozenset(executable)


def remove(path: Path) -> None:
    """Take away a file, link or folder, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        path.chmod(0o700)
        shutil.rmtree(path)


def remove_named(folder: Path, names: Sequence[str]) -> list[str]:
    """Take away everything below ``folder`` that has one of these names; what was taken away."""
    gone: list[str] = []
    wanted = set(names)
    for where, folders, files in os.walk(folder):
        for name in folders:
            if not Path(where, name).is_symlink():
                Path(where, name).chmod(0o755)  # an agent may have hidden something
        for name in [*folders, *files]:
            if name in wanted:
                path = Path(where, name)
                remove(path)
                gone.append(str(path.relative_to(folder)))
        folders[:] = [name for name in folders if name not in wanted]
    return gone


def overlay(source: Path, target: Path) -> None:
    """Copy those files below ``source`` that ``target`` has nothing in the place of."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        place = target / name
        if not _real_parents(target, name) or place.is_symlink() or place.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            place.mkdir()
        else:
            shutil.copy2(path, place, follow_symlinks=False)


def put(source: Path, target: Path, name: str) -> None:
    """Make ``name`` below ``target`` a copy of ``source``, a file or a folder, whatever is there.
    No link in ``target`` is followed."""
    folder = target
    for part in Path(name).parent.parts:
        folder /= part
        if folder.is_symlink() or not folder.is_dir():
            remove(folder)
            folder.mkdir()
    remove(target / name)
    if source.is_dir():
        shutil.copytree(source, target / name, symlinks=True)
    else:
        shutil.copy2(source, target / name, follow_symlinks=False)


def _real_parents(root: Path, name: Path) -> bool:
    return all(
        (root / parent).is_dir() and not (root / parent).is_symlink()
        for parent in name.parents
        if parent.parts
    )
