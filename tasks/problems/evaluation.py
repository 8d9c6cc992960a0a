"""Bounds and outcome of an evaluation. Imports nothing heavy: every pytest run pays for it."""

from __future__ import annotations

from dataclasses import dataclass


class EvaluatorError(RuntimeError):
    """Our side of an evaluation failed, so there is no score. The agent's code never causes it."""


@dataclass(frozen=True)
class EvaluationLimits:
    """Bounds of one evaluation."""

    seconds: float
    """Wall time of all tests together."""
    memory_mb: int
    """Address space of the process that runs the agent's code."""


@dataclass(frozen=True)
class TestReport:
    """What the hidden tests found."""

    __test__ = False

    passed: int
    total: int
    log: str
    """One line a test, for people."""
    timed_out: bool
    """The evaluation's own time limit ended it; tests that did not run count as failed."""
