"""The policies that a step's objective compares with: of the step's start, and of the run's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells.checkpoint import CheckpointError, find_checkpoint
from configs.training import RatioReference
from storage.copies import local_copy
from storage.run import Run
from tasks.warm_start.policies import PolicyError, first_policy


@dataclass(frozen=True)
class Anchor:
    """Weights that stand still, and where they lie as an HF directory."""

    path: Path
    version: int

    def argument(self) -> dict[str, Any]:
        """As replicas take it."""
        return {"path": str(self.path), "version": self.version}


def anchors_of(run: Run, version: int) -> dict[str, Anchor]:
    """What the run's objective needs in a step that starts with the weights of ``version``.

    The checkpoint of a step's start is kept until the step is done, the first policy for ever.

    Raises:
        PolicyError, CheckpointError: one of them is not there.
    """
    objective, found = run.config.training.objective, {}
    if objective.ratio is RatioReference.PROXIMAL:
        found["proximal"] = _of_version(run, version)
    if objective.kl:
        found["reference"] = _of_version(run, 0)
    return found


def _of_version(run: Run, version: int) -> Anchor:
    if version == 0:
        key = first_policy(run)
        if key is None:
            raise PolicyError(f"run {run.run_id}: the policy that it started from is gone")
        return Anchor(local_copy(run.store, key), version)
    checkpoint = find_checkpoint(run, version)
    if checkpoint is None:
        raise CheckpointError(
            f"run {run.run_id}: there is no checkpoint of version {version}, which the step starts "
            f"from and training.objective.ratio=proximal needs"
        )
    return Anchor(local_copy(run.store, checkpoint.policy_key), version)
