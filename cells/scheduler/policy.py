"""The interface of a policy and how its due samples are pipelined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cells.scheduler.snapshot import Move, Snapshot


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How steps relate to the batches they train.

    `lag` is 0 where a step trains its own batch and 1 where it trains the batch before, so that
    rollout and training overlap across steps. With `streaming`, micro-steps are ready as soon as
    their group is sealed; without it, when the last group of the batch is. Where it `carries`, the
    driver asks the policy for the pace, and groups may outlive the step that launched them.
    """

    lag: int
    streaming: bool
    carries: bool = False


class Policy(Protocol):
    """A pure function from a snapshot to moves; the same snapshot always gives the same moves."""

    @property
    def name(self) -> str:
        """The name by which `make_policy` makes it."""

    @property
    def pipeline(self) -> Pipeline:
        """What the driver of the steps has to know."""

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """The moves to start now, none of them for a cell that is switching.

        A cell that is told to train first hands its sessions over; one that is told to serve first
        ends the micro-step that it runs.
        """


class PolicyError(ValueError):
    """A policy that cannot work: an unknown name or setting, or too few cells for it."""
