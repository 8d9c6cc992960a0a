"""The machine under a run: cores, memory, limits, devices, clock."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from cells.serving.cpu_support.conditions import GPU_DEVICES
from configs.cells import Device
from configs.run import RunConfig
from flows.doctor.finding import Finding, fail, ok, warn

MEMORY = Path("/dev/shm")
RDMA = Path("/sys/class/infiniband")
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")

CELL_BYTES = 3 << 30
"""An engine and a replica of a small policy on a CPU; a large one has its own GPUs."""
REST_BYTES = 1 << 30
SHARED_BYTES = 64 << 20
LEAST_FILES = 256
_RELEASED = 1_767_225_600.0
"""2026-01-01: a clock before this version was made is wrong."""
_ASK_LIMIT_S = 20


def cores(config: RunConfig, allowed: set[int] | None = None) -> Finding:
    """Whether the cells may run on the cores that they are pinned to."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    pinned = {cell.name: set(cell.cpus) - allowed for cell in config.cells.cells}
    wrong = [f"cell {name} is pinned to {sorted(cores)}" for name, cores in pinned.items() if cores]
    if wrong:
        return fail(
            "cores",
            f"{'; '.join(wrong)}, this process may use {_ranges(allowed)}",
            "pin elsewhere with cells.cells, or leave cpus empty, which pins to none",
        )
    quota = _quota()
    if quota is not None and quota < len(allowed):
        return warn(
            "cores",
            f"{len(allowed)} cores ({_ranges(allowed)}) under a quota of {quota:g}",
            "raise the container's CPU quota: pinned cells stall when it is used up",
        )
    if len(allowed) < len(config.cells.cells):
        return warn(
            "cores",
            f"{len(allowed)} for {len(config.cells.cells)} cells",
            "use fewer cells, or more cores: they take turns",
        )
    return ok("cores", f"{len(allowed)} ({_ranges(allowed)})")


def memory(config: RunConfig) -> Finding:
    """Whether the cells' processes fit."""
    free = psutil.virtual_memory().available
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            free = min(free, int(path.read_text()))
    needed = len(config.cells.cells) * CELL_BYTES + REST_BYTES
    found = f"{free / 1e9:.1f} GB free, {len(config.cells.cells)} cells take {needed / 1e9:.1f} GB"
    if config.cells.device is Device.CPU and free < needed:
        check = fail if free < needed / 2 else warn
        return check("memory", found, "end other programs, or use fewer cells")
    return ok("memory", found)


def shared_memory(folder: Path = MEMORY) -> Finding:
    """Where weights pass from replica to engine."""
    if not folder.is_dir():
        return warn("/dev/shm", "missing", "weights pass over the disk, which is slower")
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e6:,.0f} MB free"
    if free < SHARED_BYTES:
        return warn(
            "/dev/shm", found, "give the container more (docker run --shm-size=1g); gyre gc"
        )
    return ok("/dev/shm", found)


def open_files(config: RunConfig) -> Finding:
    """The limit of open files of one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = LEAST_FILES + 8 * config.rollout.concurrent
    found = f"{soft:,} (at most {hard:,}), {needed:,} are enough"
    if soft < LEAST_FILES:
        return fail("open files", found, f"ulimit -n {max(needed, 65_536)}")
    if soft < needed:
        return warn("open files", found, f"ulimit -n {max(needed, 65_536)}")
    return ok("open files", found)


def gpu(config: RunConfig, devices: tuple[Path, ...] = GPU_DEVICES) -> Finding:
    """Whether the device of the cells is the one that is here."""
    found = [str(device) for device in devices if device.exists()]
    cuda = config.cells.device is Device.CUDA
    if cuda and not found:
        return fail(
            "gpu", "none, and cells.device is cuda", "set cells.device=cpu, or start it on a GPU"
        )
    if not cuda and found:
        return fail(
            "gpu",
            f"{', '.join(found)}, and cells.device is cpu",
            "set cells.device=cuda: what stands in for CUDA's packages would hide them",
        )
    return ok("gpu", _graphics() or "none; cells.device is cpu")


def rdma(folder: Path = RDMA) -> Finding:
    """Network cards that Mooncake can read remote memory with."""
    cards = {
        card.name: any("ACTIVE" in _text(port) for port in card.glob("ports/*/state"))
        for card in (sorted(folder.iterdir()) if folder.is_dir() else ())
    }
    down = [name for name, active in cards.items() if not active]
    if down:
        return warn("rdma", f"{', '.join(down)}: no active port", "check cables and drivers")
    return ok("rdma", ", ".join(cards) or "none: Mooncake moves weights over TCP")


def clock(now: float | None = None) -> Finding:
    """Whether the time is possible."""
    now = time.time() if now is None else now
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _RELEASED:
        return fail("clock", found, "set the clock: limits, ages and certificates depend on it")
    return ok("clock", found)


def _graphics() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_ASK_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.strip().splitlines())


def _quota() -> float | None:
    """Cores that a cgroup allows; None without a limit."""
    with suppress(OSError, ValueError):
        most, period = CGROUP_QUOTA.read_text().split()
        return int(most) / int(period)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _ranges(numbers: set[int]) -> str:
    """``0-3, 6`` for 0, 1, 2, 3 and 6."""
    parts: list[str] = []
    rest = sorted(numbers)
    while rest:
        end = next((i for i in range(1, len(rest)) if rest[i] != rest[0] + i), len(rest))
        parts.append(str(rest[0]) if end == 1 else f"{rest[0]}-{rest[end - 1]}")
        rest = rest[end:]
    return ", ".join(parts) or "none"
