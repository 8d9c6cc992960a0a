"""What the orchestration of a run costs: processor time of the server, the worker and the flow."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from flows.server import Orchestration
from storage.objects import MissingObjectError
from storage.run import Run

_LOST_MARKS = (b"dropping", b"Dropping")
"""What Prefect's server writes into its log for every event that it loses."""


@dataclass(frozen=True)
class Cost:
    """Processor seconds of one flow run's orchestration, and what it is a share of.

    Args:
        server_s: of the Prefect server and worker, where this process has started them.
        flow_s: of the flow's own process, its tasks' threads included; None for a flow that does
            not write down what it took.
        wall_s: how long the flow run took.
        cores: of this machine.
        dropped: events that the server says it has lost; None where its log can't be seen.
    """

    server_s: float
    flow_s: float | None
    wall_s: float
    cores: int
    dropped: int | None

    @property
    def share(self) -> float:
        """Of the processor time that the machine had meanwhile."""
        return self.total_s / max(self.wall_s * self.cores, 1e-9)

    @property
    def total_s(self) -> float:
        return self.server_s + (self.flow_s or 0.0)

    def line(self) -> str:
        dropped = "unknown" if self.dropped is None else str(self.dropped)
        flow = "" if self.flow_s is None else f", flow {self.flow_s:.0f}"
        return (
            f"orchestration: {self.total_s:.0f} CPU s "
            f"(server and worker {self.server_s:.0f}{flow}), "
            f"{self.share:.1%} of {self.cores} cores in {self.wall_s:.0f} s; "
            f"dropped events: {dropped}"
        )


class Meter:
    """Counts from when it is made."""

    def __init__(self, prefect: Orchestration, home: Path) -> None:
        self._prefect = prefect
        self._log = home / "server.log"
        self._began = time.monotonic()
        self._server_s = self._spent()

    def read(self, run: Run, flow_run_id: str) -> Cost:
        """The cost so far of a flow run of ``run``."""
        return Cost(
            server_s=self._spent() - self._server_s,
            flow_s=_flow_seconds(run, flow_run_id),
            wall_s=time.monotonic() - self._began,
            cores=len(os.sched_getaffinity(0)),
            dropped=self._dropped(),
        )

    def _spent(self) -> float:
        return sum(_own_seconds(process.pid) for process in self._prefect.started)

    def _dropped(self) -> int | None:
        if not self._prefect.own_server:
            return None
        with self._log.open("rb") as lines:
            return sum(any(mark in line for mark in _LOST_MARKS) for line in lines)


def _own_seconds(pid: int) -> float:
    """Of a process itself: the worker's descendants are the flow and all that the flow started."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _flow_seconds(run: Run, flow_run_id: str) -> float | None:
    """What the flow's process wrote of itself at its end, if it was this flow run."""
    try:
        proof: dict[str, Any] = orjson.loads(run.store.read(run.layout.manifest))
    except MissingObjectError:
        return None
    if proof.get("prefect", {}).get("flow_run_id") != flow_run_id or "flow" not in proof:
        return None
    return float(proof["flow"]["cpu_s"])
