"""Processes and files that runs which have ended left on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil

from cells.leftovers import find_leftovers
from cells.living import registered
from flows.doctor.finding import Finding, ok, warn
from storage.errors import StorageError
from storage.layout import RunLayout
from storage.objects import Store

DAEMONS = ("cells.host", "cells.gateway.server", "tasks.rollout.host")
CHILDREN = ("cells.serving.launch", "cells.replica.worker")
START_S = 7200.0
"""No daemon takes longer to register: the largest ``cells.start_limit_s``."""


@dataclass(frozen=True)
class Stale:
    """A process that nobody will ever ask for anything."""

    pid: int
    group: int
    what: str
    why: str


def stale_processes() -> Iterator[Finding]:
    """One row for each process of a dead run."""
    found = list(find_stale())
    for stale in found:
        yield warn(
            "processes",
            f"{stale.what}, pid {stale.pid}: {stale.why}",
            f"kill -TERM -- -{stale.group}",
        )
    if not found:
        yield ok("processes", "none of dead runs")


def leftovers() -> Finding:
    """Files of killed processes outside of any storage root."""
    found = find_leftovers()
    if not found:
        return ok("left over", "nothing")
    size = sum(leftover.size for leftover in found)
    return warn(
        "left over",
        f"{len(found)} files and folders of dead processes, {size / 1e6:,.1f} MB, such as "
        f"{found[0].path}",
        "gyre gc removes them",
    )


def find_stale(now: float | None = None) -> Iterator[Stale]:
    """Daemons whose run is gone or has replaced them, and engines and replicas without an owner."""
    now = time.time() if now is None else now
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            module, given = _of(process.cmdline())
            if module in DAEMONS:
                why = _why_stale(process, given, now)
                what = f"{given.get('--name', module)} of run {given.get('--run', '?')}"
            elif module in CHILDREN and process.ppid() == 1:
                why, what = "the cell that owned it is dead", module
            else:
                continue
            if why:
                yield Stale(process.pid, os.getpgid(process.pid), what, why)


def _of(argv: list[str]) -> tuple[str, dict[str, str]]:
    """The module that a Python process runs, and its options."""
    if len(argv) < 3 or argv[1] != "-m":
        return "", {}
    return argv[2], dict(pairwise(argv[3:]))


def _why_stale(process: psutil.Process, given: dict[str, str], now: float) -> str:
    root, run_id, name = (given.get(key, "") for key in ("--root", "--run", "--name"))
    layout = RunLayout(run_id)
    try:
        store = Store(root)
        if not store.exists(layout.config):
            return f"there is no such run in {root} any more"
        pids = {found.name: found.pid for found in registered(store, layout)}
    except (StorageError, ValueError, OSError):
        return ""
    if name in pids and pids[name] != process.pid and psutil.pid_exists(pids[name]):
        return f"pid {pids[name]} has taken its place"
    if name not in pids and now - process.create_time() > START_S:
        return "it has not registered"
    return ""
