"""DAPO's clip: wider above than below, so that unlikely tokens can become likely.

Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv
2503.14476), section 3.1 and equation 8. Its mean over all tokens of a group would give long
executions more votes; within an execution it is ``execution_mean: token``.
"""

from __future__ import annotations

from tasks.training.objectives.grpo import GRPO


class DAPO(GRPO):
    """GRPO with a clip of 1 - 0.2 and 1 + 0.28."""

    LOW, HIGH = 0.2, 0.28
