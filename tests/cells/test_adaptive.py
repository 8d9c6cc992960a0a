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
    Pacer,
    PolicyError,
    Ran,
    Role,
    Shape,
    Snapshot,
    SoFar,
    Spell,
    Timings,
    TrainingWork,
    make_policy,
)

SHAPE = Shape(cells=4, capacity=10, groups_per_update=2, updates_per_burst=4)
GROUP = GroupSeen(place_s=4000.0, lag_s=500.0, span_s=1500.0, timed_out=False)
BURSTS = Spell(updates=4, update_s=1000.0, train_s=1000.0, groups=(GROUP,) * 8, staleness=1.5)
"""The work of an update: 2 x (4000/10 + 1000)/4 = 700 s; carried over 700 x 4/3.5 x 1.04 = 832."""
FAR = 1000


def test_an_unknown_workload_stays_in_bursts() -> None:
    for seen in (Measured(), Measured(replace(BURSTS, groups=(GROUP,) * 7))):
        pacing = Adaptive().pacing(seen, SHAPE, FAR)
        assert (pacing.pace, pacing.window) == (Pace.BURST, 8)
        assert "too few groups" in pacing.reason
    pacing = Adaptive().pacing(Measured(replace(BURSTS, running=3)), SHAPE, FAR)
    assert pacing.pace is Pace.BURST
    assert "3 of the groups still run" in pacing.reason
    assert Adaptive().pacing(Measured(replace(BURSTS, running=2)), SHAPE, FAR).pace is Pace.CARRY


def test_groups_are_carried_over_where_bursts_wait_and_staleness_allows_it() -> None:
    pacing = Adaptive().pacing(Measured(BURSTS), SHAPE, FAR)
    assert pacing.pace is Pace.CARRY
    assert 2 * SHAPE.groups_per_update < pacing.window < SHAPE.burst
    assert pacing.serving_cells == 2  # 29 % of four cells, and one more at most
    assert "takes 1000 s, carried over 832 s (71% training)" in pacing.reason
    assert pacing.may_wait == 0.35  # 333 s would keep the staleness


def test_executions_wait_less_where_staleness_leaves_no_time() -> None:
    late = Measured(replace(BURSTS, groups=(replace(GROUP, lag_s=1200.0),) * 8))
    pacing = Adaptive().pacing(late, SHAPE, FAR)
    assert pacing.pace is Pace.CARRY
    assert pacing.may_wait == 0.2


def test_work_whose_groups_take_too_long_stays_in_bursts() -> None:
    late = replace(GROUP, lag_s=1.5 * 980.0, timed_out=True)
    pacing = Adaptive().pacing(Measured(replace(BURSTS, groups=(late,) * 8)), SHAPE, FAR)
    assert pacing.pace is Pace.BURST
    assert "980 s keep staleness at 1.5, 100% of the groups timed out" in pacing.reason


def test_always_asks_for_nothing_but_that_groups_can_be_carried() -> None:
    pacing = Adaptive(always=True).pacing(Measured(), SHAPE, FAR)
    assert (pacing.pace, pacing.window, pacing.serving_cells) == (Pace.CARRY, 5, 3)
    alone = replace(SHAPE, cells=1)
    assert Adaptive(always=True).pacing(Measured(), alone, FAR).pace is Pace.BURST


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


def test_carrying_over_is_not_judged_by_a_burst_that_was_not_seen_to_its_end() -> None:
    slow = replace(BURSTS, update_s=1100.0)
    estimated = replace(BURSTS, running=1)
    assert Adaptive().pacing(Measured(estimated, slow), SHAPE, FAR).pace is Pace.CARRY


def test_the_rest_of_a_run_is_no_burst_that_waits_for_what_runs() -> None:
    seen = Measured(BURSTS, replace(BURSTS, update_s=1100.0))
    assert Adaptive().pacing(seen, SHAPE, 2 * SHAPE.burst).pace is Pace.BURST
    for left, window in ((2 * SHAPE.burst - 1, 4), (SHAPE.burst, SHAPE.burst)):
        pacing = Adaptive().pacing(seen, SHAPE, left)
        assert (pacing.pace, pacing.window) == (Pace.CARRY, window)


def test_a_first_burst_lasts_as_long_as_its_longest_execution() -> None:
    ended = replace(GROUP, place_s=40.0, lag_s=5.0, span_s=90.0)
    for began, update_s in ((0.0, 200 / 4), (100.0, 100 / 4)):
        # One execution runs, and is taken to run as long again as it did.
        running = ((Ran.expected(began, 100.0, 1000.0),),)
        so_far = SoFar(100.0, [0.0], 1.0, (ended,) * 7, 8, running, serving_s=0.0)
        choice = Pacer(Adaptive(), SHAPE, FAR).choose(so_far)
        assert choice is not None and choice.bursts is not None
        assert choice.bursts.update_s == pytest.approx(update_s)


def test_a_staleness_above_that_of_bursts_makes_the_window_smaller() -> None:
    pace = Adaptive().pacing
    used = replace(BURSTS, window=5.0)
    stale = pace(Measured(BURSTS, replace(used, staleness=2.5)), SHAPE, FAR)
    fresh = pace(Measured(BURSTS, replace(used, staleness=0.5)), SHAPE, FAR)
    assert stale.window < fresh.window
    owing = pace(Measured(BURSTS, excess=200.0), SHAPE, FAR)
    assert owing.window < pace(Measured(BURSTS, excess=-200.0), SHAPE, FAR).window


def test_the_last_groups_of_a_run_are_launched_together() -> None:
    # The longest group takes 1500 s, an update 832: 1.8 updates of two groups.
    assert Adaptive().pacing(Measured(BURSTS), SHAPE, 4).window == 4
    long = replace(BURSTS, groups=(replace(GROUP, span_s=9000.0),) * 8)
    assert Adaptive().pacing(Measured(long), SHAPE, 8).window == 8
    assert Adaptive().pacing(Measured(long), SHAPE, 9).window < 9


def test_an_update_waits_for_a_group_that_would_be_too_old() -> None:
    policy = Adaptive(max_staleness=5)
    assert [policy.holds(oldest) for oldest in range(6)] == [False] * 4 + [True] * 2


def test_nothing_is_carried_over_where_staleness_allows_no_more_than_bursts() -> None:
    pacing = Adaptive(max_staleness=3).pacing(Measured(BURSTS), SHAPE, FAR)
    assert pacing.pace is Pace.BURST


def test_settings_that_make_no_sense_are_refused() -> None:
    for setting in (
        {"min_gain": 1.0},
        {"min_gain": -0.1},
        {"dwell_s": -1.0},
        {"max_staleness": -1},
    ):
        with pytest.raises(PolicyError):
            make_policy("adaptive", **setting)


def test_a_group_is_measured_by_its_tokens() -> None:
    group = GroupSeen.of([Ran(0.0, 10.0, False), Ran(0.0, 30.0, True)])
    assert (group.place_s, group.span_s) == (40.0, 30.0)
    assert group.lag_s == pytest.approx((10 * 25 + 30 * 15) / 40)
    assert GroupSeen.of([Ran(0.0, 30.0, False, waited_s=20.0)]).place_s == 10.0
    assert group.timed_out
    assert GroupSeen.of([Ran(5.0, 5.0, False)]).lag_s == 0.0


def cell(number: int, role: Role, live: int = 0) -> CellView:
    target = Role.TRAINING if role is Role.SWITCHING else None
    return CellView(f"c{number}", role, live, number == 0, capacity=10, version=0, target=target)


def moves(*cells: CellView, **more: Any) -> dict[str, Role]:
    values: dict[str, Any] = {
        "training": TrainingWork(40, 40, 8, 0),
        "timings": Timings(micro_step_s=60.0),
        "queued": 0,
        "pace": Pace.CARRY,
        "serving_cells": 2,
        "may_wait": 0.2,
        **more,
    }
    seen = Snapshot(time=1e4, running=sum(each.live for each in cells), cells=cells, **values)
    return {move.cell_id: move.to for move in Adaptive().decide(seen)}


def test_in_bursts_it_decides_as_elastic() -> None:
    serving = (cell(0, Role.ROLLOUT, 6), cell(1, Role.ROLLOUT, 2))
    assert moves(*serving, pace=Pace.BURST) == {"c0": Role.TRAINING}
    assert moves(*serving, pace=Pace.BURST, queued=5) == {}


def test_a_cell_serves_while_it_is_filled_well_enough() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, Role.ROLLOUT, 2))
    assert moves(*cells) == {}
    assert moves(cells[0], cell(1, Role.ROLLOUT, 1)) == {"c1": Role.TRAINING}
    assert moves(cells[0], cell(1, Role.ROLLOUT, 1), queued=4) == {}
    two = (cell(0, Role.TRAINING), cell(1, Role.ROLLOUT, 8), cell(2, Role.ROLLOUT, 3))
    assert moves(*two) == {"c2": Role.TRAINING}  # one of eleven waits


def test_the_core_trains_whatever_lives() -> None:
    assert moves(cell(0, Role.ROLLOUT, 9), cell(1, Role.ROLLOUT, 9)) == {"c0": Role.TRAINING}
    cells = (cell(0, Role.TRAINING), cell(1, Role.SWITCHING))
    assert moves(*cells, training=TrainingWork(4), queued=3) == {}


def test_a_core_that_is_alone_serves_what_lives() -> None:
    alone = cell(0, Role.TRAINING)
    assert moves(alone, training=TrainingWork(4), queued=3) == {"c0": Role.ROLLOUT}


def test_few_executions_wait_for_more() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, Role.TRAINING), cell(2, Role.TRAINING))
    assert moves(*cells, queued=6) == {}
    assert moves(*cells, queued=7) == {"c1": Role.ROLLOUT}
    assert moves(*cells, queued=4, coming=3) == {"c1": Role.ROLLOUT}
    assert moves(*cells, queued=30) == {"c1": Role.ROLLOUT, "c2": Role.ROLLOUT}
    assert moves(*cells, queued=30, serving_cells=1) == {"c1": Role.ROLLOUT}


def test_nothing_waits_when_it_is_old_or_the_last_or_training_has_nothing_else() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, Role.TRAINING), cell(2, Role.TRAINING))
    back = {"c1": Role.ROLLOUT}
    assert moves(*cells, queued=1, oldest=5) == {}
    assert moves(*cells, queued=1, oldest=6) == back
    assert moves(*cells, queued=1, last=True) == back
    assert moves(*cells, queued=1, overdue=True) == back
    assert moves(*cells, queued=1, training=TrainingWork(40, 0, 0, 3)) == back
    serving = (cell(0, Role.TRAINING), cell(1, Role.ROLLOUT, 1))
    assert moves(*serving, oldest=6) == moves(*serving, last=True) == {}


def test_all_serve_when_nothing_is_left_to_train() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, Role.TRAINING))
    assert set(moves(*cells, training=TrainingWork()).values()) == {Role.ROLLOUT}
