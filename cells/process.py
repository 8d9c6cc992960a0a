"""Child processes that never outlive their owner."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    cwd: Path | None = None,
    cpus: Sequence[int] = (),
    detached: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, output appended to ``log``.

    Unless ``detached``, the kernel kills the process when the **thread** that called this ends, so
    call it from a thread that lives as long as the owner (the main thread of a daemon). A detached
    process ends itself: it holds a lease.
    """
    log.parent.mkdir(parents=True, exist_ok=True)

    def before_exec() -> None:
        if cpus:
            os.sched_setaffinity(0, set(cpus))
        if not detached:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    with open(log, "ab") as output:
        return subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,
        )


def end_group(pid: int, grace_s: float) -> None:
    """SIGTERM to the process group of ``pid``, SIGKILL after ``grace_s`` seconds to what is left.

    Also ends descendants that left the group, found before the first signal. Blocks for at most
    ``grace_s`` and a second more: call it in a thread from an event loop.
    """
    found = _family(pid)
    _signal_group(pid, signal.SIGTERM)
    for process in found:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    _signal_group(pid, signal.SIGKILL)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=1)


def cpu_seconds(pid: int | None) -> float:
    """User and system time of a process and its living descendants; 0 when it is gone."""
    if pid is None:
        return 0.0
    total = 0.0
    for process in _family(pid):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
