"""Names of storage roots and runs that mean the same in every process."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID


def absolute_root(root: str) -> str:
    """A folder as an absolute path; a URL as it is. Daemons and workers have other folders."""
    return root if "://" in root else str(Path(root).expanduser().resolve())


def own_name(flow_run: UUID) -> str:
    """A name for a run from its flow run's id, so that a retry of the flow finds its run."""
    return f"run-{str(flow_run)[:8]}"
