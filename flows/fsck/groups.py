"""A sealed group against its plan, its verdicts, and the calls that its samples are made of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from flows.fsck.executions import StoredExecution
from flows.fsck.finding import Kind
from flows.fsck.reader import Reader
from storage.layout import execution_id
from storage.records import GroupHeader, Member, QueryPlan, Scored
from storage.samples import Sample, SealedGroup
from tasks.sampling.advantages import group_advantages
from tasks.sampling.tree import CallTree

_ALMOST = 1e-9


def check_group(
    reader: Reader,
    query: QueryPlan,
    step: int,
    group: SealedGroup,
    executions: Mapping[str, StoredExecution],
) -> None:
    """Hold a sealed group against everything that it was made of."""
    key, header = reader.layout.group(query.query_id), group.header
    told = (header.query_id, header.step, header.problem_id)
    planned = (query.query_id, step, query.problem_id)
    reader.require(told == planned, key, f"it is of {told}, the plan says {planned}")
    names = [execution_id(query.query_id, member) for member in range(query.group_size)]
    sealed = [member.execution_id for member in header.members]
    reader.require(sealed == names, key, f"its members are {sealed}, the plan says {names}")
    for member in header.members:
        if member.execution_id in executions:
            _check_verdict(reader, key, member, executions[member.execution_id])
    _check_advantages(reader, key, header)
    by_name: dict[str, list[Sample]] = {}
    for sample in group.samples:
        by_name.setdefault(sample.execution_id, []).append(sample)
    for name in sorted(by_name.keys() - set(sealed)):
        reader.note(Kind.CONTRADICTION, key, f"it has samples of {name}, which is no member")
    for member in header.members:
        samples = by_name.get(member.execution_id, [])
        stored = executions.get(member.execution_id)
        _check_samples(reader, key, member, samples, stored.tree if stored else None)


def _check_verdict(reader: Reader, key: str, member: Member, stored: StoredExecution) -> None:
    """A reward that is sealed stands in a verdict of its own."""
    if not isinstance(member.verdict, Scored):
        return
    name = member.execution_id
    if not any(record.verdict == member.verdict for record in stored.verdicts):
        verdicts = reader.layout.verdicts(name)
        if reader.below(verdicts):
            text = f"{name} was sealed with a reward that none of its verdicts has"
            reader.note(Kind.CONTRADICTION, key, text)
        else:
            reader.note(Kind.MISSING, verdicts, f"{key} was sealed with a reward of {name}")
    if stored.result is None and reader.layout.execution_result(name) not in reader.keys:
        where = reader.layout.execution_result(name)
        reader.note(Kind.MISSING, where, f"{key} was sealed with a reward of {name}")


def _check_advantages(reader: Reader, key: str, header: GroupHeader) -> None:
    """They follow from the rewards, or the whole group has none."""
    rewards = [m.verdict.reward if isinstance(m.verdict, Scored) else None for m in header.members]
    sealed = [member.advantage for member in header.members]
    if reader.run.config.debug.permute_rewards or all(one is None for one in sealed):
        return
    expected = group_advantages(rewards, reader.run.config.training.objective)
    same = all(
        (one is None) == (other is None)
        and (one is None or other is None or math.isclose(one, other, abs_tol=_ALMOST))
        for one, other in zip(sealed, expected, strict=True)
    )
    reader.require(same, key, f"advantages {sealed} do not follow from rewards {rewards}")


def _check_samples(
    reader: Reader, key: str, member: Member, samples: list[Sample], tree: CallTree | None
) -> None:
    name = member.execution_id
    if member.advantage is None:
        reader.require(not samples, key, f"it has samples of {name}, which has no advantage")
        return
    reader.require(
        len(samples) == member.selected,
        key,
        f"{name}: {len(samples)} samples, {member.selected} trajectories were selected",
    )
    targets = sum(int(sample.targets.sum()) for sample in samples)
    # A group of an older version does not tell how many there are.
    told = member.target_tokens or targets
    reader.require(targets == told, key, f"{name}: {targets} targets instead of {told}")
    same = all(sample.advantage == member.advantage for sample in samples)
    reader.require(same, key, f"{name}: its samples have another advantage than the member")
    share = math.fsum(sample.weight for sample in samples)
    whole = not samples or math.isclose(share, 1.0, abs_tol=1e-6)
    reader.require(whole, key, f"{name}: the weights of its samples add up to {share:g}")
    if tree is not None:
        strange = Counter(_targets(samples)) - Counter(_sampled(tree))
        text = f"{name}: {strange.total()} targets are in none of its calls, or trained twice"
        reader.require(not strange, key, text)


def _targets(samples: Iterable[Sample]) -> Iterable[tuple[int, float, int]]:
    """Id, log-probability and version of every target."""
    for sample in samples:
        own = sample.targets
        columns = (sample.ids[own], sample.logprobs[own], sample.versions[own])
        yield from zip(*(column.tolist() for column in columns), strict=True)


def _sampled(tree: CallTree) -> Iterable[tuple[int, float, int]]:
    """The same of every sampled token of an execution."""
    for placed in tree.calls:
        ids = np.asarray(placed.call.output_ids, np.int32)
        columns = (ids, placed.logprobs, placed.versions)
        yield from zip(*(column.tolist() for column in columns), strict=True)
