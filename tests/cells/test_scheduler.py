"""Each policy decides as published, and never depends on anything but the snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cells.scheduler import (
    POLICY_NAMES,
    CellView,
    PolicyError,
    Role,
    Snapshot,
    Timings,
    TrainingWork,
    VersionBounds,
    make_policy,
)


def cell(number: int, role: Role = Role.ROLLOUT, live: int = 0, **more: object) -> CellView:
    values = {"capacity": 10, "version": 0, **more}
    return CellView(f"c{number}", role, live, number == 0, **values)


def snapshot(*cells: CellView, queued: int = 0, sealed: int = 0, **more: object) -> Snapshot:
    values = {
        "time": 1000.0,
        "training": TrainingWork(sealed, sealed, sealed, 0),
        "timings": Timings(micro_step_s=60.0),
        **more,
    }
    running = sum(each.live for each in cells)
    return Snapshot(queued=queued, running=running, cells=cells, **values)


def moves(policy: str, seen: Snapshot, **settings: float) -> dict[str, Role]:
    return {move.cell_id: move.to for move in make_policy(policy, **settings).decide(seen)}


def test_elastic_sends_the_core_first_when_the_others_have_room() -> None:
    seen = snapshot(cell(0, live=6), cell(1, live=2), cell(2, live=2), sealed=1)
    assert moves("elastic", seen) == {"c0": Role.TRAINING}


def test_elastic_keeps_every_cell_that_live_work_needs() -> None:
    seen = snapshot(cell(0, live=7), cell(1, live=7), cell(2, live=7), sealed=50)
    assert moves("elastic", seen) == {}


def test_queued_executions_count_as_live() -> None:
    free = snapshot(cell(0, live=5), cell(1, live=5), sealed=9)
    assert moves("elastic", free) == {"c0": Role.TRAINING}
    assert moves("elastic", replace(free, queued=1)) == {}


def test_elastic_sends_the_emptiest_satellites_next() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, live=6), cell(2, live=2), cell(3, live=1))
    assert moves("elastic", snapshot(*cells, sealed=50)) == {
        "c3": Role.TRAINING,
        "c2": Role.TRAINING,
    }


def test_tokens_limit_as_executions_do() -> None:
    cells = tuple(cell(n, live=1, live_tokens=400, token_capacity=1000) for n in range(3))
    assert moves("elastic", snapshot(*cells, sealed=1)) == {"c0": Role.TRAINING}
    full = tuple(replace(each, live_tokens=700) for each in cells)
    assert moves("elastic", snapshot(*full, sealed=1)) == {}


def test_a_satellite_stays_where_its_switch_costs_more_than_it_saves() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, live=1), cell(2, live=1))
    short = snapshot(*cells, sealed=4, timings=Timings(micro_step_s=1.0))
    assert moves("elastic", short) == {}
    assert moves("elastic", short, min_gain=0.1) == {"c1": Role.TRAINING}


def test_hysteresis_holds_a_cell_in_its_role() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, since=990.0), cell(2))
    seen = snapshot(*cells, sealed=50)
    assert moves("elastic", seen, dwell_s=30) == {"c2": Role.TRAINING}
    later = replace(seen, time=1020.0)
    assert set(moves("elastic", later, dwell_s=30)) == {"c1", "c2"}


def test_headroom_asks_for_more_room_than_is_needed() -> None:
    seen = snapshot(cell(0, live=5), cell(1, live=4), sealed=9)
    assert moves("elastic", seen, headroom=0.1) == {"c0": Role.TRAINING}
    assert moves("elastic", seen, headroom=0.2) == {}


def test_elastic_brings_satellites_back_for_queued_work_but_not_the_core() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, Role.TRAINING), cell(2, live=10))
    assert moves("elastic", snapshot(*cells, queued=3, sealed=9)) == {"c1": Role.ROLLOUT}
    both = (cell(0, Role.TRAINING), cell(2, live=10))
    assert moves("elastic", snapshot(*both, queued=3, sealed=9)) == {}


def test_the_idle_core_comes_back_only_with_weights_that_may_serve() -> None:
    cells = (cell(0, Role.TRAINING, version=5), cell(1, live=10))
    work = TrainingWork(expected=9)
    waits = snapshot(*cells, queued=3, training=work, versions=VersionBounds(3, 4))
    assert moves("elastic", waits) == {}
    fits = replace(waits, versions=VersionBounds(3, 5))
    assert moves("elastic", fits) == {"c0": Role.ROLLOUT}


def test_satellites_that_need_no_other_weights_come_back_first() -> None:
    cells = (
        cell(0, Role.TRAINING),
        cell(1, Role.TRAINING, version=7),
        cell(2, Role.TRAINING, version=4),
        cell(3, live=10),
    )
    seen = snapshot(*cells, queued=3, sealed=9, versions=VersionBounds(4, 4))
    assert moves("elastic", seen) == {"c2": Role.ROLLOUT}


def test_a_cell_on_its_way_back_counts_as_room() -> None:
    arriving = cell(1, Role.SWITCHING, target=Role.ROLLOUT)
    cells = (cell(0, Role.TRAINING), arriving, cell(2, Role.TRAINING), cell(3, live=10))
    assert moves("elastic", snapshot(*cells, queued=3, sealed=9)) == {}


@pytest.mark.parametrize("policy", ["elastic", "colocate"])
def test_one_cell_alternates(policy: str) -> None:
    assert moves(policy, snapshot(cell(0, live=3), sealed=5)) == {}
    assert moves(policy, snapshot(cell(0), sealed=5)) == {"c0": Role.TRAINING}
    assert moves(policy, snapshot(cell(0, Role.TRAINING))) == {"c0": Role.ROLLOUT}


def test_colocate_waits_for_the_last_execution_and_moves_all_together() -> None:
    assert moves("colocate", snapshot(cell(0), cell(1, live=1), sealed=90)) == {}
    everyone = {"c0": Role.TRAINING, "c1": Role.TRAINING}
    assert moves("colocate", snapshot(cell(0), cell(1), sealed=90)) == everyone
    done = snapshot(cell(0, Role.TRAINING), cell(1, Role.TRAINING))
    assert moves("colocate", done) == {"c0": Role.ROLLOUT, "c1": Role.ROLLOUT}


def test_colocate_after_a_resume_finishes_what_is_ready_and_then_serves() -> None:
    cells = (cell(0, Role.TRAINING), cell(1, Role.TRAINING))
    assert moves("colocate", snapshot(*cells, queued=4, sealed=2)) == {}
    stuck = snapshot(*cells, queued=4, training=TrainingWork(expected=6))
    assert set(moves("colocate", stuck).values()) == {Role.ROLLOUT}


@pytest.mark.parametrize("policy", ["async", "async_streaming"])
def test_a_fixed_split_moves_once(policy: str) -> None:
    first = snapshot(cell(0, live=2), cell(1, live=2), cell(2, live=2), sealed=3)
    assert moves(policy, first, training_cells=2) == {"c0": Role.TRAINING, "c1": Role.TRAINING}
    placed = snapshot(cell(0, Role.TRAINING), cell(1, Role.TRAINING), cell(2))
    assert moves(policy, placed, training_cells=2) == {}
    assert make_policy(policy).pipeline.lag == 1


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(PolicyError, match="no policy 'fast'; there are colocate, async"):
        make_policy("fast")
    with pytest.raises(PolicyError, match="streaming"):
        make_policy("async", streaming=True)
    with pytest.raises(PolicyError, match="negative"):
        make_policy("elastic", min_gain=-1)
    with pytest.raises(PolicyError, match="at least one training cell"):
        make_policy("async", training_cells=0)
    with pytest.raises(PolicyError, match="more than 1 cells"):
        make_policy("async").decide(snapshot(cell(0)))


def test_contradictory_snapshots_are_refused() -> None:
    with pytest.raises(ValueError, match="contradictory"):
        TrainingWork(expected=1, sealed=2)
    with pytest.raises(ValueError, match="target"):
        cell(0, Role.SWITCHING)
    with pytest.raises(ValueError, match="target"):
        cell(0, Role.ROLLOUT, target=Role.TRAINING)


def test_the_names_of_the_policies() -> None:
    settings = {"async": {"training_cells": 2}}
    made = [make_policy(name, **settings.get(name, {})) for name in POLICY_NAMES]
    assert [policy.name for policy in made] == list(POLICY_NAMES)
    assert [policy.pipeline.streaming for policy in made] == [False, False, True, True, True]
