"""Selected trajectories as samples: ids, own targets, log-probabilities, versions, weights."""

from __future__ import annotations

import numpy as np

from configs.training import ExecutionMean
from storage.samples import Sample
from tasks.sampling.advantages import trajectory_weights
from tasks.sampling.selection import Selection, Trajectory
from tasks.sampling.tree import CallTree


def make_samples(
    tree: CallTree,
    selection: Selection,
    *,
    execution_id: str,
    advantage: float,
    mean: ExecutionMean,
) -> tuple[Sample, ...]:
    """One sample per trajectory, in the order of the selection."""
    counts = [trajectory.target_tokens for trajectory in selection.trajectories]
    weights = trajectory_weights(counts, mean)
    return tuple(
        _sample(tree, trajectory, execution_id, advantage, weight)
        for trajectory, weight in zip(selection.trajectories, weights, strict=True)
    )


def _sample(
    tree: CallTree, trajectory: Trajectory, execution_id: str, advantage: float, weight: float
) -> Sample:
    ids = tree.ids(tree.calls[trajectory.tip].end)
    targets = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for number in trajectory.targets:
        segment = tree.segments[number]
        assert segment.call is not None  # a selection holds sampled segments only
        placed = tree.calls[segment.call]
        here = slice(segment.start, segment.start + len(segment.ids))
        there = slice(segment.offset, segment.offset + len(segment.ids))
        targets[here] = True
        logprobs[here] = placed.logprobs[there]
        versions[here] = placed.versions[there]
    for array in (ids, targets, logprobs, versions):
        array.flags.writeable = False
    return Sample(
        execution_id=execution_id,
        kind=trajectory.kind,
        ids=ids,
        targets=targets,
        logprobs=logprobs,
        versions=versions,
        advantage=advantage,
        weight=weight,
    )
