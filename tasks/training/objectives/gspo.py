"""Group sequence policy optimisation: one importance ratio per trajectory, its tokens' mean.

Source: Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), equations 5 to 7, on
the own targets of a trajectory.
"""

from __future__ import annotations

from torch import Tensor

from configs.training import ObjectiveConfig


class GSPO:
    """s = exp(mean(log pi - log pi_behaviour)); loss = -min(s A, clip(s, 1 - low, 1 + high) A)."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self._low = 1 - config.clip_low
        self._high = 1 + config.clip_high

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, advantage: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of one sample.

        Args:
            logprobs: [targets], the policy's; differentiable.
            behaviour: [targets], as recorded when they were sampled.
            advantage: of the execution.

        Returns:
            The loss, a scalar; and ``ratio``, the sample's s, and ``clipped``, 1 when the clip
            leaves it without a gradient and 0 otherwise.
        """
        ratio = (logprobs - behaviour).mean().exp()
        gain = ratio * advantage
        bound = ratio.clamp(self._low, self._high) * advantage
        clipped = bool(bound < gain)
        loss = -(bound if clipped else gain)
        return loss, {"ratio": float(ratio.detach()), "clipped": float(clipped)}
