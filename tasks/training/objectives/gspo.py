"""Group sequence policy optimisation: one importance ratio per trajectory, its tokens' mean.

Source: Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), equations 5 to 7, on
the own targets of a trajectory.
"""

from __future__ import annotations

from torch import Tensor

from tasks.training.objectives.clipped import Clipped


class GSPO(Clipped):
    """s = exp(mean(log pi - log pi_old)); loss = -min(s A, clip(s, 1 - low, 1 + high) A)."""

    LOW, HIGH = 3e-4, 4e-4

    def ratios(self, logs: Tensor) -> Tensor:
        return logs.mean().exp()
