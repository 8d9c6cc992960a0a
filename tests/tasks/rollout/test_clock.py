"""Scheduling never changes how long an execution may work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from configs.problems import ClockKind
from tasks.rollout.clock import ExecutionClock

_seconds = st.floats(0, 1e6)


@given(_seconds, _seconds, st.lists(_seconds, max_size=5), _seconds)
def test_waiting_leaves_the_work_clock_as_it_is(
    limit_s: float, work_s: float, waits: list[float], start: float
) -> None:
    clock = ExecutionClock(ClockKind.WORK, limit_s, start)
    waited = sum(waits)
    left = clock.left_s(start + work_s + waited, waited)
    assert abs(left - (limit_s - work_s)) < 1e-3


@given(_seconds, _seconds, _seconds)
def test_the_wall_clock_counts_all(limit_s: float, passed_s: float, waited_s: float) -> None:
    clock = ExecutionClock(ClockKind.WALL, limit_s, 0.0)
    assert clock.left_s(passed_s, waited_s) == limit_s - passed_s


@given(_seconds, _seconds, _seconds)
def test_asking_with_no_wait_is_never_too_late(limit: float, now: float, waited: float) -> None:
    for kind in ClockKind:
        clock = ExecutionClock(kind, limit, 0.0)
        assert clock.left_s(now, 0.0) <= clock.left_s(now, waited)
