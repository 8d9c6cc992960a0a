"""Cells held to a share of a core by control groups, wherever their run starts them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tasks.rollout.sandboxes.cgroup import hierarchies
from tasks.rollout.sandboxes.limits import Limits

_LOOK_S = 0.5


class NoQuotasError(RuntimeError):
    """Nobody lets this process limit others."""


@contextmanager
def held_to(cores: float, run_id: str, cells: tuple[str, ...]) -> Iterator[None]:
    """Each cell of a run, its engine and replica included, gets so many cores and never more.

    Raises:
        NoQuotasError: there is no control group for processors that this process may use.
    """
    tree = next((tree for tree in hierarchies() if "cpu" in tree.controllers), None)
    if tree is None:
        raise NoQuotasError("no control groups here that limit processors")
    limits = Limits(memory_mb=1, file_mb=1, cpu_s=1, cores=cores)
    quota = {k: v for k, v in tree.settings(limits).items() if k.startswith("cpu.")}
    places = {cell: tree.parent / f"gyre-cells-{os.getpid()}-{cell}" for cell in cells}
    for place in places.values():
        place.mkdir()
        for name, value in quota.items():
            (place / name).write_text(value)
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(run_id, places, done), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()
        for place in places.values():
            for pid in (place / "cgroup.procs").read_text().split():
                _enter(tree.parent, int(pid))
            place.rmdir()


def _watch(run_id: str, places: dict[str, Path], done: threading.Event) -> None:
    """Puts hosts where they belong as they come; what they start from then on is there as well."""
    while not done.wait(_LOOK_S):
        for process in psutil.process_iter(["cmdline"]):
            argv = process.info["cmdline"] or []
            if "cells.host" not in argv or run_id not in argv:
                continue
            place = places[argv[argv.index("--name") + 1].removeprefix("cell-")]
            with suppress(psutil.Error):
                for member in [process, *process.children(recursive=True)]:
                    _enter(place, member.pid)


def _enter(place: Path, pid: int) -> None:
    with suppress(OSError):  # it has ended
        (place / "cgroup.procs").write_text(str(pid))
