"""Sentences that stand below the tables."""

from __future__ import annotations

from cells.simulation.compare import Comparison
from cells.simulation.recorded import RecordedTimes
from cells.simulation.workload import Origin, Workload


def facts(comparison: Comparison) -> str:
    """The bound, what streaming saves, and the parameters that were fitted or chosen."""
    workload = comparison.workload
    return (
        f"{workload.name}: {len(comparison.seeds)} seeds; elastic gains at most "
        f"{comparison.colocate_limit:.3f} over Colocate with {workload.cells.count} cells; "
        f"{_streaming(comparison)}"
        f"fitted: {_names(workload, Origin.FITTED)}; "
        f"chosen with the published gains in view: {_names(workload, Origin.CHOSEN)}"
        f"{_paces(comparison)}"
    )


def _paces(comparison: Comparison) -> str:
    """Why the adaptive policy chose its paces, with the first seed."""
    choices = [c for found in comparison.outcomes.values() for c in found[0].choices]
    return "".join(f"\n  {c.time / 3600:.2f} h, {c.pace}: {c.reason}" for c in choices)


def _streaming(comparison: Comparison) -> str:
    saved = comparison.saved_by_streaming
    if saved is None:
        return ""
    waits = [comparison.training_wait(name).median for name in ("async", "async_streaming")]
    return (
        f"streaming takes {saved.median:.1%} ({saved.low:.1%} to {saved.high:.1%}) off Async; its "
        f"training cells wait {waits[0]:.1%} of the time and {waits[1]:.1%} with streaming; "
    )


def recorded_facts(recorded: RecordedTimes, comparison: Comparison) -> str:
    """What a run recorded of its time beside what its policy takes in the simulation."""
    parts = (
        f"recorded under {recorded.policy}: {recorded.wall_s:.1f} s from first execution to last "
        f"update (rollouts {recorded.rollout_s:.1f}, training {recorded.train_s:.1f}, "
        f"switches {recorded.switch_s:.1f})"
    )
    if recorded.policy not in comparison.outcomes:
        return parts
    simulated = comparison.hours(recorded.policy)
    low, high = simulated.low * 3600, simulated.high * 3600
    return f"{parts}; simulated {simulated.median * 3600:.1f} s ({low:.1f} to {high:.1f})"


def _names(workload: Workload, origin: Origin) -> str:
    names = workload.of_origin(origin)
    return f"{len(names)} ({', '.join(names)})" if names else "none"
