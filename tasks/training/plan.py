"""Which groups an update trains, what it is divided by, and at what rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.training import PackKind, Schedule, TrainingConfig, UpdateMean
from storage.records import Scored
from storage.samples import SealedGroup
from tasks.sampling.guard import TooManyExcludedError
from tasks.training.packing import SampleSize, measure_shared


@dataclass(frozen=True)
class GroupFacts:
    """What training needs to know of a sealed group besides its samples."""

    query_id: str
    executions: int
    excluded: int
    timed_out: int
    rewards: tuple[float, ...]
    """Of its valid executions."""
    voters: int
    """Valid executions with targets, in a group with spread."""
    samples: tuple[SampleSize, ...]
    versions: Mapping[int, int]
    """Target tokens by the version that sampled them."""
    stale: bool = False
    """Left out of its update: it is too old for it."""

    @property
    def new_tokens(self) -> int:
        """Of its samples, what they share counted once."""
        return sum(sample.new_tokens for sample in self.samples)


def group_facts(group: SealedGroup, pack: PackKind = PackKind.FLAT) -> GroupFacts:
    """Count a sealed group; with ``PackKind.TREE`` also what its samples share."""
    header = group.header
    scored = [m.verdict for m in header.members if isinstance(m.verdict, Scored)]
    versions: Counter[int] = Counter()
    sizes: list[SampleSize] = []
    for index, sample in enumerate(group.samples):
        own = sample.versions[sample.targets]
        versions.update(own.tolist())
        sizes.append(SampleSize(header.query_id, index, len(sample.ids), int(np.size(own))))
    if pack is PackKind.TREE:
        sizes = measure_shared(sizes, [sample.ids for sample in group.samples])
    return GroupFacts(
        query_id=header.query_id,
        executions=len(header.members),
        excluded=len(header.members) - len(scored),
        timed_out=sum(verdict.timed_out for verdict in scored),
        rewards=tuple(verdict.reward for verdict in scored),
        voters=len({sample.execution_id for sample in group.samples}),
        samples=tuple(sizes),
        versions=dict(versions),
    )


def without_stale(group: GroupFacts, version: int, most: int) -> GroupFacts:
    """A group as an update on ``version`` trains it: one with a target that is more than ``most``
    versions older has no samples and no voters."""
    if not group.versions or version - min(group.versions) <= most:
        return group
    return replace(group, samples=(), voters=0, versions={}, stale=True)


def update_shares(groups: int, updates: int) -> tuple[int, ...]:
    """Groups of each update of a step, in order of arrival: even, the first ones larger by one."""
    share, left = divmod(groups, updates)
    return tuple(share + (update < left) for update in range(updates))


def update_of(arrival: int, shares: Sequence[int]) -> int:
    """Update of the group that is sealed as number ``arrival``; more than planned go to the last.

    Where fewer groups come than were planned, the last updates have fewer or none.
    """
    for update, share in enumerate(shares):
        if arrival < share:
            return update
        arrival -= share
    return len(shares) - 1


def divisor(groups: Iterable[GroupFacts], mean: UpdateMean, min_valid: int) -> int:
    """N: the executions that an update's gradient is the mean over; 0 without any.

    Args:
        min_valid: a group with fewer valid executions was dropped, and none of it counts.
    """
    if mean is UpdateMean.ALL_VALID:
        valid = [len(group.rewards) for group in groups if not group.stale]
        return sum(count for count in valid if count >= min_valid)
    return sum(group.voters for group in groups)


def learning_rate(config: TrainingConfig, step: int, update: int) -> float:
    """Rate of an update: it rises linearly over the first ``warmup_updates`` of the run, then is
    constant, or falls towards ``final_rate``, which the update after the last one would have."""
    number = step * config.updates_per_step + update
    if number + 1 < config.warmup_updates:
        return config.learning_rate * (number + 1) / config.warmup_updates
    begin = max(0, config.warmup_updates - 1)  # the first update at the full rate
    done = (number - begin) / (config.steps * config.updates_per_step - begin)
    match config.schedule:
        case Schedule.CONSTANT:
            left = 1.0
        case Schedule.LINEAR:
            left = 1 - done
        case Schedule.COSINE:
            left = (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * left)


def check_excluded(groups: Iterable[GroupFacts], max_share: float) -> None:
    """Refuse an update whose signal is mostly our own failures.

    Raises:
        TooManyExcludedError: more than ``max_share`` of its executions are excluded.
    """
    counted = list(groups)
    executions = sum(group.executions for group in counted)
    excluded = sum(group.excluded for group in counted)
    if excluded > max_share * executions:
        worst = max(counted, key=lambda group: group.excluded)
        raise TooManyExcludedError(
            f"{excluded} of {executions} executions are excluded, more than the share of "
            f"{max_share:g} that scoring.max_excluded_share allows; most of them in query "
            f"{worst.query_id}. Their verdicts say why: mend the cause and run the step again"
        )
