"""What the clipped objectives have in common: min(r A, clip(r, 1 - low, 1 + high) A).

They differ in what r is: one ratio for a sample, or one for each of its targets.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7.
A ratio that is relative to a proximal policy, with the distance from there to the behaviour as a
weight: Hilton et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641), section
3; the weight is truncated as in Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from cells.replica.objective import Targets
from configs.training import ObjectiveConfig, RatioReference
from tasks.training.objectives.kl import add_kl


class Clipped(ABC):
    """A clipped objective. A subclass says what its ratios are, and its published clip."""

    LOW: ClassVar[float]
    HIGH: ClassVar[float]

    def __init__(self, config: ObjectiveConfig) -> None:
        self._config = config
        self._low = 1 - (self.LOW if config.clip_low is None else config.clip_low)
        self._high = 1 + (self.HIGH if config.clip_high is None else config.clip_high)

    @abstractmethod
    def ratios(self, logs: Tensor) -> Tensor:
        """Importance ratios, a scalar or [targets], of log-ratios [targets]; differentiable."""

    def __call__(self, targets: Targets) -> tuple[Tensor, dict[str, float]]:
        """Loss of one sample: minus the mean over its ratios of weight * min(r A, clip(r) A), and
        the KL term. The weight is 1, or min(proximal / behaviour, ``importance_cap``).

        Returns:
            The loss, a scalar; and over the ratios: ``ratio``, their mean; ``clipped``, the share
            that the clip leaves without a gradient; ``clipped_low`` and ``clipped_high``, its
            parts at either end; ``kl`` where the loss has that term.
        """
        proximal = self._config.ratio is RatioReference.PROXIMAL
        old = targets.of_proximal() if proximal else targets.behaviour
        ratios = self.ratios(targets.policy - old)
        gain = ratios * targets.advantage
        bound = ratios.clamp(self._low, self._high) * targets.advantage
        clipped = bound < gain
        kept = torch.where(clipped, bound, gain)
        if self._config.importance_cap is not None:
            weights = self.ratios(old - targets.behaviour).detach()
            kept = kept * weights.clamp(max=self._config.importance_cap)
        stats = {
            "ratio": float(ratios.detach().mean()),
            "clipped": _share(clipped),
            "clipped_low": _share(clipped & (ratios < self._low)),
            "clipped_high": _share(clipped & (ratios > self._high)),
        }
        return add_kl(self._config, targets, -kept.mean(), stats)


def _share(marks: Tensor) -> float:
    return float(marks.double().mean())
