"""Child processes that never outlive their owner."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
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
    alive = _wait_ended(found, grace_s)
    _signal_group(pid, signal.SIGKILL)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    _wait_ended(alive, 1)
    for process in found:
        with suppress(psutil.Error):
            process.wait(timeout=0)  # collects those that are our own children


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


def _wait_ended(processes: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that still run after ``limit_s``. A zombie has ended: when its parent collects it is
    not up to us, and in a container it can take a second."""
    deadline = time.monotonic() + limit_s
    pause_s = 0.001
    while alive := [process for process in processes if _runs(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return alive


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
