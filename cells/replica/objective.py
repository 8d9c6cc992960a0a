"""The loss of one sample, as a replica calls it. Losses themselves live above: they come by name.

A replica trains whatever ``module:Class`` its settings name, made from an ``ObjectiveConfig``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from torch import Tensor

from cells.replica.errors import ReplicaError
from configs.training import ObjectiveConfig


class Objective(Protocol):
    """Loss of one sample over its own targets."""

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, advantage: float
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss, a scalar to be differentiated, and statistics of the sample.

        Args:
            logprobs: float64 [targets], the policy's log-probabilities; differentiable.
            behaviour: float64 [targets], recorded when the targets were sampled.
            advantage: of the sample's execution.
        """


def load_objective(path: str, config: ObjectiveConfig) -> Objective:
    """The objective at ``module:Class``.

    Raises:
        ReplicaError: no such module or class, or it refuses the configuration.
    """
    module, _, name = path.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ReplicaError(f"objective {path!r} can't be loaded: {error}") from error
    try:
        made: Objective = kind(config)
    except (TypeError, ValueError) as error:
        raise ReplicaError(f"objective {path!r} refuses its configuration: {error}") from error
    return made
