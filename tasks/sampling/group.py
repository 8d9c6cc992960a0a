"""A query's settled executions become one sealed group."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.run import RunConfig
from storage.journal import read_journal
from storage.layout import RunLayout, execution_id
from storage.objects import Store
from storage.records import (
    Call,
    Excluded,
    ExecutionOutcome,
    ExecutionResult,
    GroupHeader,
    Member,
    QueryPlan,
    RecordError,
    Scored,
    VerdictRecord,
    decode,
)
from storage.samples import Sample, SealedGroup, read_group, seal
from tasks.sampling.advantages import group_advantages, has_spread
from tasks.sampling.samples import make_samples
from tasks.sampling.selection import Selection, select
from tasks.sampling.tree import CallTree, CallTreeError, build_tree


def build_group(
    store: Store,
    layout: RunLayout,
    config: RunConfig,
    query: QueryPlan,
    step: int,
    results: Mapping[str, ExecutionResult],
    verdicts: Mapping[str, VerdictRecord],
) -> SealedGroup:
    """Seal the group of ``query`` from what its executions left, and return what is sealed.

    It has samples of its valid members. With fewer of them than ``scoring.min_valid`` it has none.

    A group that is sealed already is returned as it is: a verdict that came later is not trained.

    Args:
        results: by execution id. A member without one, or whose host failed, is excluded.
        verdicts: by execution id, the newest of each. A member without one is excluded.

    Raises:
        StorageError: calls can't be read or the group can't be written.
    """
    key = layout.group(query.query_id)
    if store.exists(key):
        return read_group(store, key)
    names = [execution_id(query.query_id, member) for member in range(query.group_size)]
    settled = [
        _settle(store, layout, config, name, results.get(name), verdicts.get(name))
        for name in names
    ]
    rewards = [one.reward for one in settled]
    credited = rewards
    if config.debug.permute_rewards:
        credited = permuted(rewards, f"{config.seed}/{query.query_id}")
    dropped = sum(reward is not None for reward in rewards) < config.scoring.min_valid
    advantages = group_advantages(credited, config.training.objective)
    if dropped:
        advantages = (None,) * len(settled)
    samples: list[Sample] = []
    members: list[Member] = []
    for one, advantage in zip(settled, advantages, strict=True):
        members.append(_member(one, advantage))
        if advantage is not None and one.traced is not None:
            samples.extend(
                make_samples(
                    one.traced.tree,
                    one.traced.selection,
                    execution_id=one.name,
                    advantage=advantage,
                    mean=config.training.objective.execution_mean,
                )
            )
    header = GroupHeader(
        query_id=query.query_id,
        step=step,
        problem_id=query.problem_id,
        sealed_at=time.time(),
        members=tuple(members),
        spread=has_spread(rewards) and not dropped,
    )
    return seal(store, key, SealedGroup(header, tuple(samples)))


def permuted(rewards: Sequence[float | None], seed: str) -> list[float | None]:
    """The same rewards given to other valid members; those without one keep having none."""
    valid = [reward for reward in rewards if reward is not None]
    random.Random(seed).shuffle(valid)
    shuffled = iter(valid)
    return [None if reward is None else next(shuffled) for reward in rewards]


def is_sealed(store: Store, layout: RunLayout, query: str) -> bool:
    """Whether a verdict of this query's executions would come too late to be trained."""
    return store.exists(layout.group(query))


def read_calls(store: Store, layout: RunLayout, execution: str) -> list[Call]:
    """The recorded calls of an execution.

    Raises:
        RecordError: a line is not a call of a format that this version reads.
    """
    prefix = layout.calls(execution)
    return [decode(line, Call, where=prefix) for line in read_journal(store, prefix)]


@dataclass(frozen=True)
class _Traced:
    tree: CallTree
    selection: Selection


@dataclass(frozen=True)
class _Settled:
    """A member before its group's statistics."""

    name: str
    verdict: Scored | Excluded
    traced: _Traced | None

    @property
    def reward(self) -> float | None:
        return self.verdict.reward if isinstance(self.verdict, Scored) else None


def _settle(
    store: Store,
    layout: RunLayout,
    config: RunConfig,
    name: str,
    result: ExecutionResult | None,
    record: VerdictRecord | None,
) -> _Settled:
    if result is None:
        return _Settled(name, Excluded(reason="no_result", detail="it never ended"), None)
    if result.outcome is ExecutionOutcome.HOST_FAILED:
        return _Settled(name, Excluded(reason="host_failed", detail=result.detail), None)
    if record is None:
        return _Settled(name, Excluded(reason="no_verdict", detail="it was not scored"), None)
    if isinstance(record.verdict, Excluded):
        return _Settled(name, record.verdict, None)
    try:
        calls = read_calls(store, layout, name)
        tree = build_tree(calls)
    except (RecordError, CallTreeError) as error:
        return _Settled(name, Excluded(reason="calls_damaged", detail=str(error)), None)
    if result.calls and not calls:
        lost = Excluded(reason="calls_lost", detail=f"none of {result.calls} calls is recorded")
        return _Settled(name, lost, None)
    traced = _Traced(tree, select(tree, config.trajectory, config.model.context))
    return _Settled(name, record.verdict, traced)


def _member(one: _Settled, advantage: float | None) -> Member:
    if one.traced is None:
        return Member(
            execution_id=one.name, verdict=one.verdict, advantage=advantage, paths=0, selected=0
        )
    selection = one.traced.selection
    return Member(
        execution_id=one.name,
        verdict=one.verdict,
        advantage=advantage,
        paths=selection.paths,
        selected=len(selection.trajectories),
        target_tokens=selection.target_tokens,
        dropped_tokens=selection.dropped_tokens,
        cut_tokens=selection.cut_tokens,
        kept=dict(selection.kept),
        dropped=dict(selection.dropped),
    )
