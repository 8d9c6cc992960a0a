"""Processes that belong to a folder, found and ended; also the watcher that does so when an
execution host is killed.

As a program (``python -I -S strays.py FOLDER [GROUP...]``) it waits until its standard input ends,
which is when its owner has ended in whatever way, then kills what belongs to the folder or is in
the control groups and deletes them.
Standard library only, and little of it: it sits beside the host for the whole run.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_ROUNDS = 100
_PAUSE_S = 0.05


def find_strays(folder: str) -> list[int]:
    """Processes whose working folder or environment lies in ``folder``; never this one."""
    found = []
    marker = os.fsencode(folder.rstrip("/") + "/")
    for name in os.listdir("/proc"):  # noqa: PTH208  (pathlib is slow to import)
        if name.isdigit() and int(name) != os.getpid() and _belongs(name, marker):
            found.append(int(name))
    return found


def end_strays(folder: str) -> int:
    """Kill what belongs to ``folder`` until nothing does; returns how many processes that were.

    Blocks for at most a few seconds.
    """
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        strays = find_strays(folder)
        if not strays:
            break
        for pid in strays:
            killed.add(pid)
            try:  # noqa: SIM105  (contextlib is slow to import)
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_PAUSE_S)
    return len(killed)


def _belongs(pid: str, marker: bytes) -> bool:
    try:
        working = os.fsencode(os.readlink(f"/proc/{pid}/cwd"))  # noqa: PTH115
        if working == marker[:-1] or working.startswith(marker):
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"=" + marker in file.read(1 << 20)
    except OSError:  # it has ended (a zombie has neither), or is another user's
        return False


def end_groups(bases: list[str]) -> None:
    """Kill what is in the control groups below these, and take them away.

    Blocks for at most a few seconds.
    """
    for _ in range(_ROUNDS):
        left = [place for base in bases for place, _, _ in os.walk(base, topdown=False)]
        if not left:
            break
        for place in left:
            try:
                with open(f"{place}/cgroup.procs") as file:
                    for pid in file.read().split():
                        os.kill(int(pid), signal.SIGKILL)
                os.rmdir(place)  # noqa: PTH106
            except OSError:  # what was killed is not gone yet
                pass
        time.sleep(_PAUSE_S)


def main(folder: str, groups: list[str]) -> None:
    """Watch until the owner ends, then clean up after it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    end_groups(groups)
    if os.path.isdir(folder):  # noqa: PTH112
        end_strays(folder)
        os.execvp("rm", ["rm", "-rf", "--", folder])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
