"""Truncated importance sampling: the policy gradient, weighted with what a sample is worth.

Sources: Ionides, "Truncated Importance Sampling" (2008), equation 2; Espeholt et al., "IMPALA"
(arXiv 1802.01561), section 4.2. The bound of 2 is that of Yao et al., "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training" (2025).
"""

from __future__ import annotations

from torch import Tensor

from cells.replica.objective import Targets
from configs.training import ObjectiveConfig
from tasks.training.objectives.kl import add_kl

_CAP = 2.0


class TruncatedImportance:
    """w_t = sg(min(pi_t / pi_behaviour_t, cap)); gradient = -mean over t of w_t A grad log pi_t.

    A target beyond the cap keeps a gradient, of bounded size; a clip would take it away.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self._config = config
        self._cap = _CAP if config.importance_cap is None else config.importance_cap

    def __call__(self, targets: Targets) -> tuple[Tensor, dict[str, float]]:
        """Loss of one sample, of the value -mean(w_t) A, and the KL term.

        Returns:
            The loss, a scalar; and over the targets: ``ratio``, the mean before the cap;
            ``clipped`` and ``clipped_high``, the share that it bounds; ``kl`` where the loss has
            that term.
        """
        ratios = (targets.policy - targets.behaviour).detach().exp()
        here = (targets.policy - targets.policy.detach()).exp()  # one, with the gradient of log pi
        gain = ratios.clamp(max=self._cap) * here * targets.advantage
        bounded = float((ratios > self._cap).double().mean())
        stats = {"ratio": float(ratios.mean()), "clipped": bounded, "clipped_high": bounded}
        return add_kl(self._config, targets, -gain.mean(), stats)
