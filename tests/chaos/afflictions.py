"""What can be done to the processes of a run, and doing it."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.flows.orchestrated import marked_processes

CELLS = ("a", "b", "c")
STOP_S = 15.0
_SCRATCH = re.compile(r"\S*gyre-executions-\w+")


@dataclass(frozen=True)
class Affliction:
    """What is done to which process."""

    name: str
    words: tuple[str, ...]
    """Of its command line."""
    below: str = ""
    """It is a child of the process with these words, with this one; itself when empty."""
    stop_s: float = 0.0
    """Stopped for so long instead of killed."""


def _of_cells() -> Iterator[Affliction]:
    for cell in CELLS:
        host = ("-m cells.host", f"cell-{cell}")
        for name, below in (
            (f"cell host {cell}", ""),
            (f"SGLang of {cell}", "cells.serving.launch"),
            (f"replica of {cell}", "cells.replica.worker"),
        ):
            yield Affliction(f"{name} killed", host, below)
            yield Affliction(f"{name} stopped", host, below, STOP_S)


AFFLICTIONS = (
    Affliction("Prefect server killed", ("prefect server start",)),
    Affliction("Prefect server stopped", ("prefect server start",), stop_s=STOP_S),
    Affliction("worker killed", ("prefect worker start",)),
    Affliction("flow killed", ("prefect.engine",)),
    Affliction("flow stopped", ("prefect.engine",), stop_s=STOP_S),
    Affliction("gateway killed", ("cells.gateway.server",)),
    Affliction("gateway stopped", ("cells.gateway.server",), stop_s=STOP_S),
    Affliction("execution host killed", ("tasks.rollout.host",)),
    Affliction("execution host stopped", ("tasks.rollout.host",), stop_s=STOP_S),
    *_of_cells(),
)


class Drawn:
    """All of them in random order, again and again: each comes before any comes twice, as more
    than five deaths of one daemon in half an hour are not promised to be survived."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._left: list[Affliction] = []

    def strike(self, root: Path) -> str | None:
        """Do the first whose process is there, and return its name; the others stay for later."""
        if not self._left:
            self._left = self._chance.sample(AFFLICTIONS, len(AFFLICTIONS))
        for affliction in self._left:
            if afflict(root, affliction):
                self._left.remove(affliction)
                return affliction.name
        return None


def afflict(root: Path, affliction: Affliction) -> bool:
    """Do it; False when there is no such process now."""
    found = [process for process, line in marked_processes(root) if _has(line, affliction.words)]
    if affliction.below:
        found = [
            child
            for process in found
            for child in _children(process)
            if affliction.below in _line(child)
        ]
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP if affliction.stop_s else signal.SIGKILL)
    if found and affliction.stop_s:
        time.sleep(affliction.stop_s)
        for process in found:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
    return bool(found)


def scratch_folders(root: Path) -> set[str]:
    """Where the run's harnesses work now. They have an environment of their own, so that only this
    tells them from those of other runs."""
    return {
        folder
        for process, line in marked_processes(root)
        if "tasks.rollout.host" in line
        for child in _children(process)
        for folder in _SCRATCH.findall(_line(child))
    }


def left_running(root: Path, scratch: set[str], limit_s: float) -> list[str]:
    """Command lines of what still runs of a run that has ended; what cleans up gets ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while True:
        left = [line for _, line in marked_processes(root)]
        for process in psutil.process_iter():
            line = _line(process)
            left += [line] * any(folder in line for folder in scratch)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(1)


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _has(line: str, words: tuple[str, ...]) -> bool:
    return all(word in line for word in words)


def _line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
