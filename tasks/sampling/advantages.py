"""One vote per execution: advantages inside a group, and the shares of an execution's loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from configs.training import Baseline, ExecutionMean, ObjectiveConfig


def group_advantages(
    rewards: Sequence[float | None], config: ObjectiveConfig
) -> tuple[float | None, ...]:
    """A = (R - baseline) / (std + epsilon) over the members that have a reward.

    Args:
        rewards: of each member of a group; None for an excluded one, which influences nothing.

    Returns:
        An advantage for each member; None for excluded members, and for all when fewer than two
        have a reward or their rewards do not differ: such a group has no gradient.
    """
    valid = [reward for reward in rewards if reward is not None]
    if not has_spread(rewards):
        return (None,) * len(rewards)
    mean = math.fsum(valid) / len(valid)
    scale = 1.0
    if config.normalise_std:
        variance = math.fsum((reward - mean) ** 2 for reward in valid) / len(valid)
        scale = math.sqrt(variance) + config.epsilon
    if config.baseline is Baseline.LEAVE_ONE_OUT:
        # R - mean of the others = (R - mean of all) n / (n - 1).
        scale *= (len(valid) - 1) / len(valid)
    return tuple(None if reward is None else (reward - mean) / scale for reward in rewards)


def has_spread(rewards: Sequence[float | None]) -> bool:
    """Whether at least two members have a reward and two rewards differ."""
    return len({reward for reward in rewards if reward is not None}) > 1


def trajectory_weights(target_counts: Sequence[int], mean: ExecutionMean) -> tuple[float, ...]:
    """Share of each of an execution's trajectories in its loss; they sum to one.

    Args:
        target_counts: own targets of each trajectory, all positive.
    """
    if mean is ExecutionMean.TRAJECTORY:
        return (1 / len(target_counts),) * len(target_counts) if target_counts else ()
    total = sum(target_counts)
    return tuple(count / total for count in target_counts)
