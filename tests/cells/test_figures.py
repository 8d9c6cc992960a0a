"""What the scheduler is told in figures."""

from __future__ import annotations

from typing import Any

import pytest

from cells.figures import Figures
from cells.scheduler import Role
from configs.cells import CellsConfig


def figures(capacity: int | None = None, **more: Any) -> Figures:
    config = CellsConfig.model_validate({"executions_per_cell": capacity, "kv_tokens": 8000})
    return Figures(config, 1000, **{"moves": (), **more})


def status(tokens: int | None = None, **pace: float | None) -> dict[str, Any]:
    return {"engine": {"token_capacity": tokens}, "pace": pace}


def gateway(**cells: tuple[int, int]) -> dict[str, Any]:
    return {"cells": {name: {"live": n, "tokens": t} for name, (n, t) in cells.items()}}


def test_a_cell_has_room_for_whole_contexts_until_calls_tell_better() -> None:
    found = figures()
    assert found.capacity("a") == 8
    found.saw_cell("a", status(tokens=6000))
    assert (found.token_capacity("a"), found.capacity("a"), found.capacity("b")) == (6000, 6, 8)
    found.saw_gateway(gateway(a=(3, 600), b=(1, 200)))
    assert (found.execution_tokens, found.capacity("a"), found.capacity("b")) == (200, 30, 40)
    found.saw_gateway(gateway(a=(0, 0)))
    assert found.execution_tokens == 200, "nobody runs: what was seen last is the best guess"
    found.saw_gateway(gateway(a=(1, 50_000)))
    assert found.capacity("a") == 1


def test_the_setting_counts_where_there_is_one() -> None:
    found = figures(capacity=5)
    found.saw_gateway(gateway(a=(3, 600)))
    assert found.capacity("a") == 5


def test_timings_are_running_means_of_all_cells_and_earlier_moves() -> None:
    found = figures(moves=[(Role.TRAINING, 3.0), (Role.ROLLOUT, 5.0)])
    assert (found.timings.to_training_s, found.timings.to_rollout_s) == (2.0, 3.0)
    found.moved(Role.TRAINING, 4.0)
    assert found.timings.to_training_s == 3.0
    assert (found.timings.micro_step_s, found.timings.pull_s) == (1.0, 0.0)
    found.saw_cell("a", status(micro_step_s=2.0, pull_s=None))
    found.saw_cell("b", status(micro_step_s=4.0, pull_s=0.5))
    assert found.timings.micro_step_s == pytest.approx(3.0)
    assert found.timings.pull_s == pytest.approx(0.5)
