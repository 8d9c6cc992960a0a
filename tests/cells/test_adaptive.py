"""Adaptive chooses a pace by what was measured, says why, and never leaves live work unserved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cells.scheduler import (
    Adaptive,
    CellView,
    GroupSeen,
    Measured,
    Pace,
    PolicyError,
    Ran,
    Role,
    Shape,
    Snapshot,
    Spell,
    Timings,
    TrainingWork,
    make_policy,
)

SHAPE = Shape(cells=4, capacity=10, groups_per_update=2, updates_per_burst=4)
GROUP = GroupSeen(place_s=4000.0, lag_s=500.0, age_s=300.0, timed_out=False)
BURSTS = Spell(updates=4, update_s=1000.0, train_s=1000.0, groups=(GROUP,) * 8, staleness=1.5)
"""The work of an update: 2 x (4000/10 + 1000)/4 = 700 s."""
FAR = 1000


def test_an_unknown_workload_stays_in_bursts() -> None:
    for seen in (Measured(), Measured(replace(BURSTS, groups=(GROUP,) * 7))):
        pacing = Adaptive().pacing(seen, SHAPE, FAR)
        assert (pacing.pace, pacing.window) == (Pace.BURST, 8)
        assert "too few groups" in pacing.reason


def test_groups_are_carried_over_where_bursts_wait_and_staleness_allows_it() -> None:
    pacing = Adaptive().pacing(Measured(BURSTS), SHAPE, FAR)
    assert pacing.pace is Pace.CARRY
    assert 2 * SHAPE.groups_per_update < pacing.window < SHAPE.burst
    assert pacing.serving_cells == 1  # 29 % of four cells
    assert "1000 s, its work 700 s (71% training)" in pacing.reason


def test_work_whose_groups_take_too_long_stays_in_bursts() -> None:
    late = replace(GROUP, lag_s=1.5 * 980.0, timed_out=True)
    pacing = Adaptive().pacing(Measured(replace(BURSTS, groups=(late,) * 8)), SHAPE, FAR)
    assert pacing.pace is Pace.BURST
    assert "980 s keep staleness at 1.5, 100% of the groups timed out" in pacing.reason


def test_bursts_that_waste_nothing_stay() -> None:
    pacing = Adaptive().pacing(Measured(replace(BURSTS, update_s=740.0)), SHAPE, FAR)
    assert pacing.pace is Pace.BURST
    assert "too little to gain" in pacing.reason


@pytest.mark.parametrize("shape", [replace(SHAPE, cells=1), replace(SHAPE, updates_per_burst=1)])
def test_nothing_is_carried_where_nothing_can_be(shape: Shape) -> None:
    assert Adaptive().pacing(Measured(BURSTS), shape, FAR).pace is Pace.BURST


def test_carrying_over_that_was_slower_ends() -> None:
    slow = replace(BURSTS, update_s=1100.0)
    pacing = Adaptive().pacing(Measured(BURSTS, slow), SHAPE, FAR)
    assert pacing.pace is Pace.BURST
    assert "it takes 1.57 of its work, in bursts 1.43" in pacing.reason
    short = replace(slow, updates=3)
    assert Adaptive().pacing(Measured(BURSTS, short), SHAPE, FAR).pace is Pace.CARRY


def test_a_staleness_above_that_of_bursts_makes_the_window_smaller() -> None:
    stale = Adaptive().pacing(Measured(BURSTS, replace(BURSTS, staleness=2.5)), SHAPE, FAR)
    fresh = Adaptive().pacing(Measured(BURSTS, replace(BURSTS, staleness=0.5)), SHAPE, FAR)
    assert stale.window < fresh.window


def test_the_last_groups_of_a_run_are_launched_together() -> None:
    assert Adaptive().pacing(Measured(BURSTS), SHAPE, 7).window == 7


def test_settings_that_make_no_sense_are_refused() -> None:
    for setting in ({"min_gain": 1.0}, {"min_gain": -0.1}, {"dwell_s": -1.0}):
        with pytest.raises(PolicyError):
            make_policy("adaptive", **setting)


def test_a_group_is_measured_by_its_tokens() -> None:
    group = GroupSeen.of([Ran(0.0, 10.0, False), Ran(0.0, 30.0, True)])
    assert group.place_s == 40.0
    assert group.lag_s == pytest.approx((10 * 25 + 30 * 15) / 40)
    assert group.age_s == pytest.approx((10 * 5 + 30 * 15) / 40)
    assert group.timed_out
    assert GroupSeen.of([Ran(5.0, 5.0, False)]).lag_s == 0.0


def cell(number: int, role: Role, live: int = 0) -> CellView:
    return CellView(f"c{number}", role, live, number == 0, capacity=10, version=0)


def moves(*cells: CellView, **more: Any) -> dict[str, Role]:
    values: dict[str, Any] = {
        "training": TrainingWork(40, 40, 8, 0),
        "timings": Timings(micro_step_s=60.0),
        "queued": 0,
        "pace": Pace.CARRY,
        **more,
    }
    seen = Snapshot(time=1e4, running=sum(each.live for each in cells), cells=cells, **values)
    return {move.cell_id: move.to for move in Adaptive().decide(seen)}


def test_in_bursts_it_decides_as_elastic() -> None:
    serving = (cell(0, Role.ROLLOUT, 6), cell(1, Role.ROLLOUT, 2))
    assert moves(*serving, pace=Pace.BURST) == {"c0": Role.TRAINING}
    assert moves(*serving, pace=Pace.BURST, queued=5) == {}


def test_carried_over_queued_executions_hold_no_cell_back() -> None:
    assert moves(cell(0, Role.ROLLOUT, 6), cell(1, Role.ROLLOUT, 2), queued=5) == {
        "c0": Role.TRAINING
    }


def test_a_cell_stays_while_its_executions_have_no_other_place() -> None:
    assert moves(cell(0, Role.ROLLOUT, 6), cell(1, Role.ROLLOUT, 5)) == {}


def test_a_satellite_comes_back_for_the_queue_when_little_is_left_to_train() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, Role.TRAINING), cell(2, Role.ROLLOUT, 10))
    few = TrainingWork(40, 3, 3, 2)
    assert moves(*cells, queued=4, training=few) == {"c1": Role.ROLLOUT}
    assert moves(*cells, queued=4) == {}
    assert moves(*cells, queued=4, serving_cells=2) == {"c1": Role.ROLLOUT}
    assert moves(*cells, queued=0, training=few) == {}


def test_one_cell_serves_while_anything_lives() -> None:
    assert moves(cell(0, Role.TRAINING), cell(1, Role.ROLLOUT, 1)) == {}
    assert moves(cell(0, Role.TRAINING), cell(1, Role.TRAINING), queued=1) == {"c1": Role.ROLLOUT}
    assert moves(cell(0, Role.TRAINING), training=TrainingWork()) == {"c0": Role.ROLLOUT}
