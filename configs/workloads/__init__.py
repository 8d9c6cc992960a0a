"""Workload files of the simulator, shipped with the package."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def workload_names() -> tuple[str, ...]:
    """Names of the workloads that are shipped."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def workload_path(name: str) -> Path:
    """The file of a shipped workload.

    Raises:
        FileNotFoundError: if there is none of that name; the message lists those that exist.
    """
    path = _FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"no workload {name!r}; there are {', '.join(workload_names())}")
    return path
