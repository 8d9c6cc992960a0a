"""GSPO-token: the value and the clip of the sequence's ratio, the gradient target by target.

Source: Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), equations 13 and 14.
"""

from __future__ import annotations

from torch import Tensor

from tasks.training.objectives.clipped import Clipped


class GSPOToken(Clipped):
    """s_t = sg(s) pi_t / sg(pi_t), where s is the ratio of GSPO and sg stops the gradient.

    As all targets of an execution have one advantage, value and gradient are those of GSPO, up to
    rounding; the paper says so too.
    """

    LOW, HIGH = 3e-4, 4e-4

    def ratios(self, logs: Tensor) -> Tensor:
        sequence = logs.detach().mean().exp()
        return sequence * (logs - logs.detach()).exp()
