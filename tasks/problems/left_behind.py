"""Small files in places where the agent's code may have put anything."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: Path, most_bytes: int) -> bytes | None:
    """The first ``most_bytes`` of a regular file; None for a link, a folder, a pipe or nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with open(descriptor, "rb") as file:
        return file.read(most_bytes)
