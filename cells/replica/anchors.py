"""Policies that stand still while another is trained: their log-probs, without gradient.

An objective may compare the trained policy with the one of the step's start, or with the first of
the run. A replica reads such a policy from its HF directory when a micro-step first names it, so
that one which joins or comes back in the middle of a step has it too, and keeps its weights beside
the trained ones: as much memory again for each. They run through the same modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cells.replica.agreement import together
from cells.replica.packing import PackedRow
from cells.replica.policy import Policy
from cells.replica.requests import AnchorRequest, PolicyRequest


@dataclass
class Anchors:
    """The frozen policies of a replica."""

    policy: Policy
    _held: dict[str, tuple[PolicyRequest, Tensor]] = field(default_factory=dict)

    def logprobs(
        self, request: AnchorRequest, rows: Sequence[PackedRow]
    ) -> dict[str, list[Tensor] | None]:
        """Log-probabilities [targets] of each row's targets under each policy that is asked for;
        None where it is the very version that is trained, so that they are known already, and in
        the ranks that do not compute losses.

        Raises:
            ReplicaError: weights can't be read, or are of another shape.
        """
        found: dict[str, list[Tensor] | None] = {}
        for name, wanted in request.named().items():
            if wanted.version == self.policy.version:
                found[name] = None
                continue
            with self.policy.flat.using(self._weights(name, wanted)):
                found[name] = self.policy.passes.logprobs(rows)
        return found

    def drop(self) -> None:
        """Give the memory back; what is needed again is read again."""
        self._held.clear()

    def _weights(self, name: str, wanted: PolicyRequest) -> Tensor:
        """The weights of a policy, laid out like the trained ones; kept until another is wanted."""
        for held, weights in self._held.values():
            if held == wanted:
                self._held[name] = (held, weights)
                return weights
        self._held.pop(name, None)  # before the next one takes its memory
        with together(self.policy.place):
            read, _ = self.policy.read(Path(wanted.path))
        weights = torch.empty_like(self.policy.flat.weights)
        for part, view in self.policy.flat.split(weights).items():
            view.copy_(read[part])
        self._held[name] = (wanted, weights)
        return weights
