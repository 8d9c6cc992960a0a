"""The loss of one sample, as a replica calls it. Losses themselves live above: they come by name.

A replica trains whatever ``module:Class`` its settings name, made from an ``ObjectiveConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from torch import Tensor

from cells.replica.errors import ReplicaError
from configs.training import ObjectiveConfig


@dataclass(frozen=True)
class Targets:
    """The own targets of one sample, with their log-probabilities under each policy.

    All float64 [targets]. Policies that the settings don't ask for are None.
    """

    policy: Tensor
    """Of the weights that are trained; differentiable."""
    behaviour: Tensor
    """Recorded when the targets were sampled."""
    advantage: float
    """Of the sample's execution."""
    proximal: Tensor | None = None
    """Of the trainer with the weights of the step's start."""
    reference: Tensor | None = None
    """Of the trainer with the first weights of the run."""

    def of_proximal(self) -> Tensor:
        """``proximal``.

        Raises:
            ReplicaError: the micro-step did not name the policy.
        """
        return self._named(self.proximal, "proximal")

    def of_reference(self) -> Tensor:
        """``reference``.

        Raises:
            ReplicaError: the micro-step did not name the policy.
        """
        return self._named(self.reference, "reference")

    def _named(self, found: Tensor | None, name: str) -> Tensor:
        if found is None:
            raise ReplicaError(f"the objective needs the {name} policy; the micro-step names none")
        return found


class Objective(Protocol):
    """Loss of one sample over its own targets."""

    def __call__(self, targets: Targets) -> tuple[Tensor, dict[str, float]]:
        """The loss, a scalar to be differentiated, and statistics of the sample, summed up later:
        ``ratio`` and ``clipped`` (with ``clipped_low`` and ``clipped_high`` where they apply) are
        shown as means over samples."""


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
