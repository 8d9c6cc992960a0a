"""Where weights pass from the replica to the engine of a cell: HF directories, one a version."""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "gyre-"
LOCK = "owner.lock"
ROOM_FACTOR = 3
"""Two versions exist at once during an update; the third part is for others."""
ROOM_SPARE_BYTES = 64 << 20


class Exports:
    """Folder of one cell's exported weights, in memory where there is room, else on disk.

    Its owner holds a lock in it as long as it lives, so that what killed hosts left in memory is
    found and removed by the next host, of whatever run.

    Args:
        root: URL of the store, which tells apart runs of the same name.
        scratch: folder on disk to use instead of memory.
        policy: HF directory that an engine starts with; its size is that of an export.
        version: that it is.
        memory: a memory file system; None for a folder that other machines share.

    Raises:
        BlockingIOError: another host of this cell lives.
    """

    def __init__(
        self,
        *,
        root: str,
        run_id: str,
        cell: str,
        scratch: Path,
        policy: Path,
        version: int,
        memory: Path | None = MEMORY,
    ) -> None:
        if memory is not None:
            remove_abandoned(memory)
        digest = hashlib.sha256(f"{root} {run_id}".encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{PREFIX}{run_id[:48]}-{cell}-{digest}")
        in_memory = memory is not None and _has_room(memory, policy)
        self.folder = memory / name if memory is not None and in_memory else scratch
        self.folder.mkdir(parents=True, exist_ok=True)
        self._policy, self._version = policy, version
        self._lock = open(self.folder / LOCK, "wb")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise BlockingIOError(
                f"{self.folder}: another host of cell {cell} of run {run_id} lives; end it, or "
                f"wait until its lease has ended"
            ) from None
        self.keep_only(None)

    def fresh(self, version: int) -> Path:
        """An empty place for a version; what an earlier attempt left there is removed."""
        path = self.folder / f"v{version}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def kept(self, version: int) -> Path | None:
        """Where the weights of ``version`` are, if they are in files."""
        path = self.folder / f"v{version}"
        if path.is_dir():
            return path
        return self._policy if version == self._version else None

    def keep_only(self, version: int | None) -> None:
        """Remove all others. The one that an engine serves stays: it goes back to it on failure."""
        for path in self.folder.glob("v*"):
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def abandoned(memory: Path = MEMORY) -> Iterator[Path]:
    """The folders in memory whose owner is dead: nobody holds their lock, which the caller has as
    long as it does with one that it was given."""
    for lock in memory.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield lock.parent


def remove_abandoned(memory: Path = MEMORY) -> None:
    """Remove the folders in memory whose owner is dead."""
    for folder in abandoned(memory):
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(memory: Path, policy: Path) -> bool:
    if not memory.is_dir():
        return False
    size = sum(file.stat().st_size for file in policy.glob("*.safetensors"))
    return shutil.disk_usage(memory).free >= ROOM_FACTOR * size + ROOM_SPARE_BYTES
