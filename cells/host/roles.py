"""The role of a cell as a state machine. Pure: what is done in a role is in ``cells.host.cell``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

SWITCHES_KEPT = 256


class HostRole(StrEnum):
    """What a cell is doing."""

    STARTING = "starting"
    ROLLOUT = "rollout"
    SWITCHING = "switching"
    TRAINING = "training"
    FAILED = "failed"
    """For ever: a process of the cell is dead. A new cell host has to be started."""


ALLOWED: dict[HostRole, frozenset[HostRole]] = {
    HostRole.STARTING: frozenset({HostRole.ROLLOUT, HostRole.FAILED}),
    HostRole.ROLLOUT: frozenset({HostRole.SWITCHING, HostRole.FAILED}),
    HostRole.TRAINING: frozenset({HostRole.SWITCHING, HostRole.FAILED}),
    HostRole.SWITCHING: frozenset({HostRole.ROLLOUT, HostRole.TRAINING, HostRole.FAILED}),
    HostRole.FAILED: frozenset(),
}


class WrongRoleError(RuntimeError):
    """Not possible in the role that the cell is in."""


@dataclass(frozen=True)
class Switch:
    """A role change, or a change of the engine's version, that was carried out."""

    to: HostRole
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of what it consisted of: drain, backup, memory, replica, weights."""


class RoleMachine:
    """The role of one cell, why it is so, and the switches so far."""

    def __init__(self) -> None:
        self.role = HostRole.STARTING
        self.detail = "engine and replica are starting"
        self.switches: deque[Switch] = deque(maxlen=SWITCHES_KEPT)
        self._before = HostRole.STARTING
        self._since = time.monotonic()
        self._parts: dict[str, float] = {}

    def started(self) -> None:
        """Engine and replica are ready; every cell begins in rollout."""
        self._move(HostRole.ROLLOUT, "")

    def begin(self, to: HostRole) -> None:
        """Start a switch to ``rollout`` or ``training``.

        Raises:
            WrongRoleError: starting, failed, or in a switch.
        """
        before = self.role
        self._move(HostRole.SWITCHING, f"from {before} to {to}")
        self._before, self._since, self._parts = before, time.monotonic(), {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of the block as a part of the switch under way."""
        began = time.monotonic()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + time.monotonic() - began

    def finish(self, to: HostRole) -> None:
        """The switch is carried out.

        Raises:
            WrongRoleError: the cell failed meanwhile.
        """
        self._move(to, "")
        parts = {name: round(seconds, 4) for name, seconds in self._parts.items()}
        self.switches.append(Switch(to, round(time.monotonic() - self._since, 3), parts))

    def abandon(self, detail: str) -> None:
        """The switch was refused and everything is as before it.

        Raises:
            WrongRoleError: the cell failed meanwhile.
        """
        self._move(self._before, detail)

    def fail(self, detail: str) -> None:
        """A process of the cell is dead or can't be trusted. The first reason stays."""
        if self.role is not HostRole.FAILED:
            self._move(HostRole.FAILED, detail)

    def require(self, role: HostRole, what: str) -> None:
        """
        Raises:
            WrongRoleError: the cell is in another role.
        """
        if self.role is not role:
            raise WrongRoleError(
                f"{what} needs role {role}, the cell is in role {self.role}"
                + (f": {self.detail}" if self.detail else "")
            )

    def _move(self, to: HostRole, detail: str) -> None:
        if to not in ALLOWED[self.role]:
            raise WrongRoleError(
                f"a cell in role {self.role} can't go to {to}"
                + (f": {self.detail}" if self.detail else "")
            )
        self.role, self.detail = to, detail
