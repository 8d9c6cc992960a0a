"""A task folder of NL2RepoBench."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.problems.folders import read_text
from tasks.problems.source import ProblemSourceError

SPECIFICATION = "start.md"
UPSTREAM = "upstream"
"""Folder with what the task's image has in ``/workspace``: the true tests and packaging files."""
MOST_TESTS = 1_000_000


@dataclass(frozen=True)
class Task:
    """What a task folder holds."""

    folder: Path
    specification: str
    commands: tuple[str | tuple[str, ...], ...]
    """Run one after the other, whatever the ones before ended with: a shell command, or argv."""
    test_files: tuple[str, ...]
    """Files and folders of the true tests, relative to the workspace."""
    count: int
    """Tests that a right package passes."""

    @property
    def upstream(self) -> Path:
        return self.folder / UPSTREAM


def read_task(folder: Path) -> Task:
    """The task in a folder.

    Raises:
        ProblemSourceError: names the folder's file, the entry, and what it must be.
    """
    commands = _json_list(folder / "test_commands.json")
    test_files = _json_list(folder / "test_files.json")
    task = Task(
        folder=folder,
        specification=read_text(folder / SPECIFICATION),
        commands=tuple(_command(folder, number, one) for number, one in enumerate(commands)),
        test_files=tuple(_inside(folder, number, one) for number, one in enumerate(test_files)),
        count=_count(folder / "test_case_count.txt"),
    )
    if not any("pytest" in str(command) for command in task.commands):
        raise ProblemSourceError(
            f"{folder / 'test_commands.json'}: no command runs pytest, so nothing can be counted"
        )
    for name in task.test_files:
        if not (task.upstream / name).exists():
            raise ProblemSourceError(
                f"{task.upstream / name}: not there, but {folder / 'test_files.json'} names it. "
                f"The true tests are in the task's image: copy its /workspace here once (docker "
                f"create IMAGE; docker cp CONTAINER:/workspace {task.upstream})"
            )
    return task


def _json_list(path: Path) -> list[Any]:
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise ProblemSourceError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, list) or not found:
        raise ProblemSourceError(f"{path}: must be a list with at least one entry")
    return found


def _command(folder: Path, number: int, found: Any) -> str | tuple[str, ...]:
    if isinstance(found, str) and found.strip():
        return found
    if isinstance(found, list) and found and all(isinstance(part, str) for part in found):
        return tuple(found)
    raise ProblemSourceError(
        f"{folder / 'test_commands.json'}: entry {number}: must be a command or a list of its "
        f"parts, not {found!r:.80}"
    )


def _inside(folder: Path, number: int, found: Any) -> str:
    path = PurePosixPath(found) if isinstance(found, str) else PurePosixPath()
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ProblemSourceError(
            f"{folder / 'test_files.json'}: entry {number}: must be a path inside the workspace, "
            f"not {found!r:.80}"
        )
    return str(path)


def _count(path: Path) -> int:
    text = read_text(path).strip()
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_TESTS:
        raise ProblemSourceError(
            f"{path}: must hold a number between 1 and {MOST_TESTS}, not {text[:80]!r}"
        )
    return int(text)
