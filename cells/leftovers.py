"""What processes that were killed left on this machine outside of any storage root."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cells.host.exports import MEMORY, abandoned

SCRATCH = re.compile(
    r"gyre-(?:engine|replica|fit|executions|evaluation|tests|warm-start)-[a-z0-9_]{8}"
)
"""Names that ``tempfile`` makes for Gyre's processes; never a folder that a person has named."""
ENGINE_FILES = "sglang_loads_*.shm"
QUIET_S = 3600.0
"""Nothing of a temporary folder may have changed for this long; every use is far shorter, or of a
process that names the folder in its command line or environment."""


@dataclass(frozen=True)
class Leftover:
    """A file or folder that nobody uses any more."""

    path: Path
    size: int
    """Bytes."""
    what: str


def find_leftovers(
    *, memory: Path = MEMORY, temporary: Path | None = None, now: float | None = None
) -> list[Leftover]:
    """Those of this user. Folders of others are left to them."""
    now = time.time() if now is None else now
    temporary = Path(tempfile.gettempdir()) if temporary is None else temporary
    found = [Leftover(path, _size(path), "weights of a dead cell") for path in abandoned(memory)]
    candidates = [
        *((path, "load counters of a dead engine") for path in memory.glob(ENGINE_FILES)),
        *(
            (path, "scratch of a dead process")
            for path in temporary.glob("gyre-*")
            if SCRATCH.fullmatch(path.name)
        ),
    ]
    quiet = [(path, what) for path, what in candidates if _is_quiet(path, now)]
    if quiet:
        used = "\n".join(_mentions())
        found += [
            Leftover(path, _size(path), what) for path, what in quiet if str(path) not in used
        ]
    return found


def remove_leftover(leftover: Leftover) -> None:
    """Remove it; one that is gone is no error."""
    if leftover.path.is_dir():
        shutil.rmtree(leftover.path, ignore_errors=True)
    else:
        leftover.path.unlink(missing_ok=True)


def _is_quiet(path: Path, now: float) -> bool:
    try:
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return False
        inside = path.iterdir() if path.is_dir() else ()
        newest = max([path.stat().st_mtime, *(entry.lstat().st_mtime for entry in inside)])
    except OSError:
        return False
    return newest < now - QUIET_S


def _mentions() -> Iterator[str]:
    """Everything that living processes of this user say of the folders they use."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            yield from process.cmdline()
            yield from process.environ().values()
            yield process.cwd()
            yield from (file.path for file in process.open_files())
            yield Path(f"/proc/{process.pid}/maps").read_text()


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.lstat().st_size
    return total
