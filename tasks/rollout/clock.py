"""The time that counts towards an execution's limit."""

from __future__ import annotations

from dataclasses import dataclass

from configs.problems import ClockKind


@dataclass(frozen=True)
class ExecutionClock:
    """Runs from ``started_at`` to the limit; ``work`` stands still while the gateway makes the
    execution wait. Times are seconds of one monotonic clock."""

    kind: ClockKind
    limit_s: float
    started_at: float

    def left_s(self, now: float, waited_s: float) -> float:
        """Time until the limit when nothing more is waited for; zero or less when it is reached.

        Args:
            waited_s: time spent waiting in the gateway so far. The work clock can be asked with 0
                first: the limit is never reached earlier than that says.
        """
        left_out = waited_s if self.kind is ClockKind.WORK else 0.0
        return self.limit_s - (now - self.started_at) + left_out
