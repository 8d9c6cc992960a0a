"""Plans: which cells fit, and that the hardware decides their speed."""

from __future__ import annotations

import pytest

from cells.simulation.plan import Hardware, PlanError, cell_sizes, plan, workload_on
from cells.simulation.workload import Workload

HARDWARE = Hardware(gpus=16, parameters_b=8, active_parameters_b=8, context_tokens=20_000)


def test_a_cell_holds_a_replica_with_its_optimizer() -> None:
    # 8 billion parameters at 16 bytes are 128 GB, two GPUs of 80 GB with room for activations.
    assert cell_sizes(HARDWARE) == (2, 4, 8, 16)


def test_what_does_not_fit_is_refused_with_the_least_that_would() -> None:
    with pytest.raises(PlanError, match="at least 300 GPUs"):
        cell_sizes(Hardware(gpus=16, parameters_b=1200, active_parameters_b=30))


def test_speeds_follow_the_hardware(small: Workload) -> None:
    two, four = workload_on(HARDWARE, small, 2), workload_on(HARDWARE, small, 4)
    assert four.training.tokens_per_s == pytest.approx(2 * two.training.tokens_per_s)
    assert four.cells.count * 2 == two.cells.count == 8
    assert four.cells.capacity > 2 * two.cells.capacity


def test_the_options_are_sorted_and_a_single_cell_has_no_gain(small: Workload) -> None:
    options = plan(HARDWARE, small, seeds=(0,))
    assert [o.hours_per_update for o in options] == sorted(o.hours_per_update for o in options)
    single = next(option for option in options if option.cells == 1)
    assert single.gain == 1
    assert single.over_async is None
    pair = next(option for option in options if option.cells == 2)
    assert pair.over_colocate is not None
    assert pair.over_colocate.high <= 1.5
    assert pair.async_training_cells == 1
