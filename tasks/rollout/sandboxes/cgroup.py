"""Control groups: limits on all processes of a sandbox together, and a list of them to end.

Works with version 2 and version 1, wherever this process may make groups below or beside its own.
Elsewhere there are none, and only the limits of single processes hold.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tasks.rollout.sandboxes.limits import Breach, Limits

_MOUNTS = Path("/proc/self/mountinfo")
_OWN = Path("/proc/self/cgroup")
_PERIOD_US = 100_000
_END_LIMIT_S = 10.0
_PAUSE_S = 0.002
_PREFIX = "gyre-"
_numbers = itertools.count()


@dataclass(frozen=True)
class Hierarchy:
    """A tree of groups with the controllers that it serves."""

    parent: Path
    """Where this process may make groups."""
    controllers: frozenset[str]
    unified: bool

    def settings(self, limits: Limits) -> dict[str, str]:
        """File to value, for one group."""
        found: dict[str, str] = {}
        if "pids" in self.controllers:
            found["pids.max"] = str(limits.processes)
        if "memory" in self.controllers:
            name = "memory.max" if self.unified else "memory.limit_in_bytes"
            found[name] = str(limits.memory_mb << 20)
        if "cpu" in self.controllers and limits.cores:
            quota = str(int(limits.cores * _PERIOD_US))
            found |= (
                {"cpu.max": f"{quota} {_PERIOD_US}"}
                if self.unified
                else {"cpu.cfs_quota_us": quota}
            )
        return found

    @property
    def base(self) -> Path:
        """The group of all groups of this process."""
        return self.parent / f"{_PREFIX}{os.getpid()}"


@dataclass(frozen=True)
class ControlGroup:
    """The processes of one sandbox. ``end`` must be called in every case."""

    limits: Limits
    places: tuple[tuple[Hierarchy, Path], ...]

    @property
    def holds(self) -> frozenset[str]:
        """Controllers that bind: ``pids``, ``memory``, ``cpu``."""
        return frozenset(name for tree, _ in self.places for name in tree.controllers)

    def entering(self) -> list[str]:
        """Argv that starts the command after it in a new part of the group, with limits of its own.

        Of its own, so that what an earlier command left, killed but not gone yet, does not count
        against the next one.
        """
        lines, made = ["set -e"], []
        for number, (hierarchy, _) in enumerate(self.places, start=1):
            made.append(f'"${number}/$$"')
            for name, value in hierarchy.settings(self.limits).items():
                lines.append(f'echo {value} > "${number}/$$/{name}"')
            lines.append(f'echo 0 > "${number}/$$/cgroup.procs"')
        lines.insert(1, f"mkdir {' '.join(made)}")
        lines += [f"shift {len(self.places)}", 'exec "$@"']
        return ["/bin/sh", "-c", "\n".join(lines), "sh", *(str(path) for _, path in self.places)]

    def breaches(self) -> tuple[Breach, ...]:
        """Limits that something inside ran into."""
        found = set()
        for hierarchy, path in self.places:
            for part in _below(path):
                if _counted(part / "pids.events", "max"):
                    found.add(Breach.PROCESSES)
                events = "memory.events" if hierarchy.unified else "memory.oom_control"
                if _counted(part / events, "oom_kill"):
                    found.add(Breach.MEMORY)
        return tuple(sorted(found))

    def end(self) -> None:
        """Kill what is inside and take the group away. Blocks, mostly for less than a millisecond.

        Raises:
            OSError: something could not be killed.
        """
        deadline = time.monotonic() + _END_LIMIT_S
        for _, path in self.places:
            while not _removed(path):
                if time.monotonic() > deadline:
                    raise OSError(f"{path}: its processes can't be ended")
                time.sleep(_PAUSE_S)


def make_group(limits: Limits) -> ControlGroup | None:
    """A group with these limits, or None where there are no control groups.

    Raises:
        OSError: there are, and this one can't be made.
    """
    trees = [tree for tree in hierarchies() if tree.settings(limits)]
    if not trees:
        return None
    name = str(next(_numbers))
    places = []
    for tree in trees:
        base = tree.base
        if not base.exists():
            _make_base(tree)
        path = base / name
        path.mkdir()
        if tree.unified:
            _enable(path, tree.controllers)
        places.append((tree, path))
    return ControlGroup(limits, tuple(places))


@contextmanager
def grouped(limits: Limits | None) -> Iterator[ControlGroup | None]:
    """A group for as long as the context; None without limits or without control groups."""
    group = make_group(limits) if limits else None
    try:
        yield group
    finally:
        if group is not None:
            group.end()


@lru_cache(maxsize=1)
def hierarchies() -> tuple[Hierarchy, ...]:
    """The trees in which this process can limit processes, memory or cores; seen to work."""
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    own = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    found: list[Hierarchy] = []
    taken: set[str] = set()
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], set(mount[-1].split(","))
        if kind not in ("cgroup", "cgroup2"):
            continue
        for _, names, path in own:
            served = set(names.split(",")) - {""}
            if (kind == "cgroup2") != (not served) or not served <= options | {"name=systemd"}:
                continue
            tree = _usable(Path(mount[4]), path, kind == "cgroup2", served)
            if tree is not None and not tree.controllers & taken:
                taken |= tree.controllers
                found.append(tree)
    return tuple(found)


def base_folders() -> list[str]:
    """Where all groups of this process are."""
    return [str(tree.base) for tree in hierarchies()]


def remove_base() -> None:
    """Take away the group of all groups of this process; nothing may be in it."""
    for tree in hierarchies():
        _removed(tree.base)


def _usable(mount: Path, path: str, unified: bool, served: set[str]) -> Hierarchy | None:
    here = mount / path.lstrip("/")
    own = here if here.is_dir() else mount
    wanted = {"pids", "memory", "cpu"}
    if not unified:
        served &= wanted
        return Hierarchy(own, frozenset(served), False) if served and _can_make(own) else None
    # Version 2 gives controllers to the children of a group only while no process is in the group
    # itself, so where this process shares its group the new ones are made beside it.
    for place in (own, own.parent):
        if place == mount.parent or not os.access(place, os.W_OK):
            continue
        with suppress(OSError):
            there = set((place / "cgroup.controllers").read_text().split()) & wanted
            _enable(place, frozenset(there))
            if there and _can_make(place):
                return Hierarchy(place, frozenset(there), True)
    return None


def _can_make(place: Path) -> bool:
    probe = place / f"{_PREFIX}probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _make_base(tree: Hierarchy) -> None:
    for old in tree.parent.glob(f"{_PREFIX}[0-9]*"):
        # Empty ones of processes that were killed; where something still runs this is refused.
        if not Path("/proc", old.name.removeprefix(_PREFIX)).exists():
            _remove_empty(old)
    tree.base.mkdir(exist_ok=True)
    if tree.unified:
        _enable(tree.base, tree.controllers)


def _enable(place: Path, controllers: Iterable[str]) -> None:
    wanted = set(controllers)
    control = place / "cgroup.subtree_control"
    if not wanted <= set(control.read_text().split()):
        control.write_text(" ".join(f"+{name}" for name in sorted(wanted)))


def _below(path: Path) -> list[Path]:
    """Groups below ``path``, then itself: in the order in which they can be removed; none when it
    is gone, which may happen at any time."""
    try:
        children = [child for child in path.iterdir() if child.is_dir()]
    except FileNotFoundError:
        return []
    return [found for child in children for found in _below(child)] + [path]


def _removed(path: Path) -> bool:
    """Kill all in a group; whether it could be removed."""
    parts = _below(path)
    for part in parts:
        with suppress(OSError):
            for pid in (part / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    return _remove_empty(path)


def _remove_empty(path: Path) -> bool:
    for part in _below(path):
        try:
            part.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def _counted(file: Path, name: str) -> bool:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value) > 0
    return False
