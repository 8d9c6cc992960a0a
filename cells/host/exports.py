"""Where weights pass from the replica to the engine of a cell: HF directories, one a version."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM_FACTOR = 3
"""Two versions exist at once during an update; the third part is for others."""
ROOM_SPARE_BYTES = 64 << 20


class Exports:
    """Folder of one cell's exported weights, in memory where there is room, else on disk.

    The folder's name follows from root, run and cell, so that what a host that was killed left
    behind is removed by the next one.

    Args:
        root: URL of the store, which tells apart runs of the same name.
        scratch: folder on disk to use instead of memory.
        policy: HF directory whose size is that of an export.
        memory: a memory file system.
    """

    def __init__(
        self,
        *,
        root: str,
        run_id: str,
        cell: str,
        scratch: Path,
        policy: Path,
        memory: Path = MEMORY,
    ) -> None:
        store = hashlib.sha256(root.encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"gyre-{run_id}-{cell}-{store}")
        in_memory = memory / name
        shutil.rmtree(in_memory, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)
        self.folder = in_memory if _has_room(memory, policy) else scratch
        self.folder.mkdir(parents=True)

    def fresh(self, version: int) -> Path:
        """An empty place for a version; what an earlier attempt left there is removed."""
        path = self.folder / f"v{version}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def keep_only(self, version: int) -> None:
        """Remove all others. The one that an engine serves stays: it goes back to it on failure."""
        for path in self.folder.iterdir():
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _has_room(memory: Path, policy: Path) -> bool:
    if not memory.is_dir():
        return False
    size = sum(file.stat().st_size for file in policy.glob("*.safetensors"))
    return shutil.disk_usage(memory).free >= ROOM_FACTOR * size + ROOM_SPARE_BYTES
