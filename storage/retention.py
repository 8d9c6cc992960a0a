"""What of a storage root may go, in which order. Pure: listing and deleting are done elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

GRACE_S = 3600.0
"""Nothing is deleted that changed in this time: it may belong to a start under way."""


class Part(StrEnum):
    """What is deleted at once, in the order in which a quota takes it."""

    REMAINS = "remains"
    """Half-written or half-deleted: nobody can read it."""
    WORKSPACES = "workspaces"
    CHECKPOINTS = "checkpoints"
    """All but the last, from which the run goes on or is evaluated."""
    RUN = "run"
    POLICY = "policy"


@dataclass(frozen=True)
class StoredRun:
    """A run in storage. Sizes are bytes."""

    run_id: str
    changed_at: float
    """Seconds since the epoch."""
    finished: bool
    """Its last step is done."""
    in_use: str
    """Who works on it; empty when nobody does."""
    size: int
    workspaces: int
    checkpoints: int
    """Of all but the last."""
    policy: str | None
    """Key of the policy that it started from; None when that is not known."""


@dataclass(frozen=True)
class StoredPolicy:
    """A policy in storage."""

    key: str
    changed_at: float
    size: int


@dataclass(frozen=True)
class Remains:
    """Keys below ``prefix`` that nobody can read."""

    prefix: str
    changed_at: float
    size: int


@dataclass(frozen=True)
class Limits:
    """What is to stay; None sets no limit.

    Args:
        keep_runs: so many newest runs are never deleted whole. The others are, unless
            ``older_than_s`` spares them.
        older_than_s: runs that changed since are not deleted for their age. Seconds.
        most_bytes: of runs and policies together.
    """

    keep_runs: int | None = None
    older_than_s: float | None = None
    most_bytes: int | None = None


@dataclass(frozen=True)
class Removal:
    """One thing to delete."""

    part: Part
    name: str
    """Run id, key of a policy, or prefix of remains."""
    size: int
    why: str


@dataclass(frozen=True)
class Plan:
    """What to delete, and what then is left."""

    removals: tuple[Removal, ...]
    left: int
    """Bytes."""
    over: int
    """Bytes above the quota that must not be deleted; 0 when it is kept."""


def make_plan(
    runs: Sequence[StoredRun],
    policies: Sequence[StoredPolicy],
    remains: Sequence[Remains],
    limits: Limits,
    now: float,
) -> Plan:
    """What goes under ``limits``.

    Never touched: a run that somebody works on or that changed within ``GRACE_S``, the last
    checkpoint of a run that stays, a policy that a run that stays has started from.
    """
    removals = [
        Removal(Part.REMAINS, one.prefix, one.size, "half-written or half-deleted")
        for one in remains
        if one.changed_at < now - GRACE_S
    ]
    oldest_first = sorted(runs, key=lambda run: (run.changed_at, run.run_id))
    kept = _kept(oldest_first, limits)
    free = [run for run in oldest_first if not run.in_use and run.changed_at < now - GRACE_S]
    removals += _by_age(free, kept, limits, now)
    total = sum(run.size for run in runs)
    total += sum(policy.size for policy in policies) + sum(one.size for one in remains)
    total -= sum(removal.size for removal in removals)
    if limits.most_bytes is None:
        return Plan(tuple(removals), total, 0)
    gone = {removal.name for removal in removals if removal.part is Part.RUN}
    quota = f"quota of {limits.most_bytes / 1e9:.2f} GB"
    for part, candidates in _stages([run for run in free if run.run_id not in gone], kept):
        for run, size in candidates:
            parts = sum(one.size for one in removals if one.name == run.run_id)
            freed = size - parts if part is Part.RUN else size
            if total > limits.most_bytes and freed:
                removals.append(Removal(part, run.run_id, freed, quota))
                total -= freed
    gone = {removal.name for removal in removals if removal.part is Part.RUN}
    for policy in _unused(runs, policies, gone, now):
        if total > limits.most_bytes:
            removals.append(Removal(Part.POLICY, policy.key, policy.size, quota))
            total -= policy.size
    return Plan(_without_parts(removals), total, max(0, total - limits.most_bytes))


def _kept(oldest_first: Sequence[StoredRun], limits: Limits) -> set[str]:
    """Runs that are never deleted whole."""
    if not limits.keep_runs:
        return set()
    return {run.run_id for run in oldest_first[-limits.keep_runs :]}


def _by_age(
    free: Sequence[StoredRun], kept: set[str], limits: Limits, now: float
) -> Iterator[Removal]:
    if limits.keep_runs is None and limits.older_than_s is None:
        return
    least_age = limits.older_than_s or 0.0
    for run in free:
        if run.run_id not in kept and now - run.changed_at >= least_age:
            days = (now - run.changed_at) / 86_400
            yield Removal(Part.RUN, run.run_id, run.size, f"unchanged for {days:.1f} days")


def _stages(
    free: Sequence[StoredRun], kept: set[str]
) -> Iterator[tuple[Part, list[tuple[StoredRun, int]]]]:
    finished = [run for run in free if run.finished]
    yield Part.WORKSPACES, [(run, run.workspaces) for run in finished]
    yield Part.CHECKPOINTS, [(run, run.checkpoints) for run in finished]
    yield Part.RUN, [(run, run.size) for run in free if run.run_id not in kept]


def _unused(
    runs: Sequence[StoredRun], policies: Sequence[StoredPolicy], gone: set[str], now: float
) -> list[StoredPolicy]:
    """Policies that no run needs, the oldest first. A run of which that is not known needs all."""
    staying = [run for run in runs if run.run_id not in gone]
    if any(run.policy is None for run in staying):
        return []
    used = {run.policy for run in staying}
    free = [one for one in policies if one.key not in used and one.changed_at < now - GRACE_S]
    return sorted(free, key=lambda policy: (policy.changed_at, policy.key))


def _without_parts(removals: Sequence[Removal]) -> tuple[Removal, ...]:
    """Where a run goes whole, its parts go with it: one line says so."""
    whole = {removal.name for removal in removals if removal.part is Part.RUN}
    sizes = {
        name: sum(removal.size for removal in removals if removal.name == name) for name in whole
    }
    return tuple(
        Removal(removal.part, removal.name, sizes.get(removal.name, removal.size), removal.why)
        for removal in removals
        if removal.part is Part.RUN or removal.name not in whole
    )
