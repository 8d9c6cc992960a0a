"""Storage roots that mean the same in every process."""

from __future__ import annotations

from pathlib import Path


def absolute_root(root: str) -> str:
    """A folder as an absolute path; a URL as it is. Daemons and workers have other folders."""
    return root if "://" in root else str(Path(root).expanduser().resolve())
