"""One line of metrics per update, from the groups it trained and what the replicas reported."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.records import UpdateMetrics
from tasks.training.events import Stepped
from tasks.training.plan import GroupFacts

CLIPPED = "clipped_sum"
"""Statistic of a micro-step: its samples whose ratio the objective clipped."""
GAP = "logprob_gap_sum"
"""Statistic of a micro-step: |trainer's log-prob - recorded| summed over its targets."""
GAP_MAX = "logprob_gap_max"
"""Statistic of a micro-step: the largest of these differences."""

COMPUTED = "computed_tokens_sum"
"""Statistic of a micro-step: the tokens of its row."""
TARGETS_OF = "targets@"
"""Statistic of a micro-step, with a version: its targets that this version sampled. The gap of a
version is there likewise."""
WEIGHTS = "importance_sum"
"""Statistic of a micro-step: policy / behaviour summed over its targets."""
WEIGHT_SQUARES = "importance_square_sum"
"""Statistic of a micro-step: the squares of these, summed."""
BUSY = "busy_s"
"""Statistic of a micro-step: the seconds that its replica took for it."""
ENTROPY = "entropy_sum"
"""Statistic of a micro-step: the policy's entropy summed over its targets."""


@dataclass(frozen=True)
class Spent:
    """Seconds of the step so far in which executions ran, and in which cells switched."""

    rollout_s: float
    switch_s: float


def update_metrics(
    *,
    step: int,
    trained_version: int,
    groups: Iterable[GroupFacts],
    stats: Sequence[Mapping[str, float]],
    stepped: Stepped,
    spent: Spent,
    learning_rate: float | None = None,
) -> UpdateMetrics:
    """The line of one update.

    Args:
        trained_version: of the weights that its micro-steps ran on; staleness counts from it.
        groups: of this update, also those without spread.
        stats: of its micro-steps.
        learning_rate: that it was stepped with; None when there was nothing to train.
    """
    facts = list(groups)
    rewards = [reward for group in facts for reward in group.rewards]
    pass_rate = math.fsum(rewards) / len(rewards) if rewards else None
    versions: Counter[int] = Counter()
    for group in facts:
        versions.update(group.versions)
    targets = versions.total()
    samples = [sample for group in facts for sample in group.samples]
    count, gaps = len(samples), _gaps(stats)
    ages = {trained_version - version: count for version, count in versions.items()}
    return UpdateMetrics(
        step=step,
        update=stepped.update,
        policy_version=stepped.version,
        executions=sum(group.executions for group in facts),
        valid=len(rewards),
        excluded=sum(group.excluded for group in facts),
        timed_out=sum(group.timed_out for group in facts),
        reward_mean=pass_rate,
        pass_rate=pass_rate,
        staleness_mean=sum(age * n for age, n in ages.items()) / targets if targets else 0.0,
        staleness_max=max(ages, default=0),
        clip_fraction=_mean(stats, CLIPPED, count) or 0.0,
        grad_norm=stepped.grad_norm,
        logprob_gap=_total(stats, GAP) / targets if targets else 0.0,
        logprob_gap_max=max((one.get(GAP_MAX, 0.0) for one in stats), default=0.0),
        target_tokens=targets,
        trained_tokens=sum(sample.tokens for sample in samples),
        computed_tokens=round(_total(stats, COMPUTED)),
        rollout_s=spent.rollout_s,
        train_s=stepped.seconds,
        switch_s=spent.switch_s,
        ended_at=stepped.at,
        skipped=stepped.grad_norm is None and stepped.version == trained_version,
        learning_rate=learning_rate,
        logprob_gap_by_version=gaps,
        fresh_gap=gaps.get(trained_version),
        clip_fraction_low=_mean(stats, "clipped_low_sum", count),
        clip_fraction_high=_mean(stats, "clipped_high_sum", count),
        effective_samples=_effective_samples(stats, targets),
        entropy=_mean(stats, ENTROPY, targets),
        kl=_mean(stats, "kl_sum", count),
        groups=len(facts),
        groups_stale=sum(group.stale for group in facts),
        groups_without_gradient=sum(not group.voters for group in facts),
        busy_s=_total(stats, BUSY),
    )


def _gaps(stats: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Mean gap of the targets of each version that sampled some."""
    counts: Counter[str] = Counter()
    for one in stats:
        counts.update({name: round(n) for name, n in one.items() if name.startswith(TARGETS_OF)})
    versions = sorted(int(name.removeprefix(TARGETS_OF)) for name in counts)
    return {
        version: _total(stats, f"{GAP}@{version}") / counts[f"{TARGETS_OF}{version}"]
        for version in versions
    }


def _effective_samples(stats: Sequence[Mapping[str, float]], targets: int) -> float | None:
    squares = _total(stats, WEIGHT_SQUARES)
    return _total(stats, WEIGHTS) ** 2 / (targets * squares) if targets and squares else None


def _mean(stats: Sequence[Mapping[str, float]], name: str, count: int) -> float | None:
    """A statistic over ``count``; None where no micro-step has it."""
    return _total(stats, name) / count if count and any(name in one for one in stats) else None


def _total(stats: Iterable[Mapping[str, float]], name: str) -> float:
    return math.fsum(one.get(name, 0.0) for one in stats)
