"""Group relative policy optimisation: PPO's clip for each target, their mean over a trajectory.

Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), equation 3; its KL term is
``training.objective.kl``. Clip of 0.2 as in Schulman et al. (arXiv 1707.06347), table 3.
"""

from __future__ import annotations

from torch import Tensor

from tasks.training.objectives.clipped import Clipped


class GRPO(Clipped):
    """r_t = pi_t / pi_old_t; loss = -mean over t of min(r_t A, clip(r_t, 1 - low, 1 + high) A)."""

    LOW, HIGH = 0.2, 0.2

    def ratios(self, logs: Tensor) -> Tensor:
        return logs.exp()
