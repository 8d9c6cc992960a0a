"""A simulated cell and its sessions: its role, who is bound to it, and what it did when."""

from __future__ import annotations

from collections import Counter

import simpy

from cells.scheduler import CellView, Role
from cells.simulation.executions import Execution
from cells.simulation.outcome import Interval
from cells.simulation.serving import Request, ServingCell
from cells.simulation.workload import Workload


class Session:
    """A live execution: the cell it is bound to and what that cell holds of its context.

    `sampled` are its output tokens by the weight version that generated them, rounded. It is
    parked while it has begun and no cell has a place for it.
    """

    __slots__ = (
        "admitted",
        "cell",
        "cold",
        "context",
        "ended_at",
        "execution",
        "parked_at",
        "parked_s",
        "queued_at",
        "request",
        "reroutes",
        "sampled",
        "started_at",
        "version",
    )  # fmt: skip

    def __init__(self, env: simpy.Environment, execution: Execution, version: int) -> None:
        """A queued execution, which that version serves until another one is told."""
        self.execution = execution
        self.version = version
        self.sampled: Counter[int] = Counter()
        self.admitted = env.event()
        self.cell: Cell | None = None
        self.request: Request | None = None
        self.context = 0.0
        self.cold = 0.0
        self.reroutes = 0
        self.parked_at: float | None = None
        self.parked_s = 0.0
        self.queued_at = env.now
        self.started_at = env.now
        self.ended_at = env.now


class Cell:
    """One cell; it starts in rollout. Sessions are kept in the order in which they came."""

    def __init__(self, env: simpy.Environment, workload: Workload, number: int) -> None:
        """Cell number 0 is the core."""
        self._env = env
        self.cell_id = f"cell-{number:03d}"
        self.is_core = number == 0
        self.capacity = workload.cells.capacity
        self.serving = ServingCell(env, workload.serving)
        self.loaded: simpy.Event | None = None
        """While it loads other weights; calls wait for it."""
        self.sessions: dict[Session, None] = {}
        self.role = Role.ROLLOUT
        self.target: Role | None = None
        self.since = env.now
        self.version = 0
        self.intervals: list[Interval] = []

    def become(self, role: Role, target: Role | None = None) -> None:
        """Enter a role; `target` goes with switching."""
        self.close()
        self.role, self.target, self.since = role, target, self._env.now

    def close(self) -> None:
        """Write down the interval that ends now."""
        if self._env.now > self.since:
            self.intervals.append(Interval(self.cell_id, self.role, self.since, self._env.now))

    @property
    def has_place(self) -> bool:
        """Whether it serves, and could serve another execution."""
        return self.role is Role.ROLLOUT and len(self.sessions) < self.capacity

    def rollout_s(self) -> float:
        """Seconds that it has served."""
        now = self._env.now - self.since if self.role is Role.ROLLOUT else 0.0
        return now + sum(i.end - i.start for i in self.intervals if i.role is Role.ROLLOUT)

    def view(self) -> CellView:
        """The cell as a policy sees it."""
        return CellView(
            cell_id=self.cell_id,
            role=self.role,
            live=len(self.sessions),
            is_core=self.is_core,
            capacity=self.capacity,
            version=self.version,
            target=self.target,
            since=self.since,
        )
