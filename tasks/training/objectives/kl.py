"""KL divergence to the reference policy, estimated from the tokens that were sampled.

Source: Schulman, "Approximating KL Divergence" (2020), estimator k3, as a term of the loss in
Shao et al., "DeepSeekMath" (arXiv 2402.03300), equation 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cells.replica.objective import Targets
from configs.training import ObjectiveConfig


def add_kl(
    config: ObjectiveConfig, targets: Targets, loss: Tensor, stats: dict[str, float]
) -> tuple[Tensor, dict[str, float]]:
    """The loss plus ``config.kl`` times the mean over targets of q/p - log(q/p) - 1, where p is the
    policy's probability and q the reference's; ``kl`` in the statistics is that mean."""
    if not config.kl:
        return loss, stats
    away = targets.of_reference() - targets.policy
    divergence = (torch.expm1(away) - away).mean()
    return loss + config.kl * divergence, {**stats, "kl": float(divergence.detach())}
