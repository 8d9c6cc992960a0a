"""What everything inside a sandbox may use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Breach(StrEnum):
    """A limit that was run into."""

    MEMORY = "memory"
    PROCESSES = "processes"


@dataclass(frozen=True)
class Limits:
    """Bounds of a sandbox."""

    memory_mb: int
    """Of all processes together, files in memory included; without control groups the address
    space of each process."""
    file_mb: int
    """Largest file that may be written."""
    cpu_s: int
    """Processor time of each process."""
    processes: int = 256
    """At once, threads included."""
    disk_mb: int = 64
    """Size of the workspace and of each temporary folder, where they are the sandbox's own."""
    cores: float = 0
    """Processors that are used at once; 0 for any number."""

    def of_each_process(self, *, memory: bool, processes: bool) -> dict[str, int]:
        """Resource limits by name (as ``prlimit`` and ``RLIMIT_`` call them).

        Args:
            memory, processes: also those that a control group would set better.
        """
        found = {"fsize": self.file_mb << 20, "cpu": self.cpu_s, "core": 0}
        if memory:
            found["as"] = self.memory_mb << 20
        if processes:
            found["nproc"] = self.processes
        return found
