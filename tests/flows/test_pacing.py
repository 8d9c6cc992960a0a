"""What a run tells its policy of itself does not depend on how many flows its steps had."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.board import Board
from cells.paces import PaceRow
from cells.scheduler import Adaptive
from flows.pacing import RunPace
from storage.journal import read_lines
from storage.records import StepPlan, decode
from tests.flows.recorded import QUERIES, STEP_S, UPDATES, record_run


def test_bursts_of_earlier_steps_are_as_long_as_they_were(tmp_path: Path) -> None:
    run = record_run(tmp_path, steps=4)
    for step in range(1, 4):
        before = run.store.read_record(run.layout.step_plan(step - 1), StepPlan)
        board = Board(live=(), serve_version=0, expected=QUERIES)
        RunPace(run, step, Adaptive(), board, before.queries).choose(step * QUERIES, ())
    rows = [decode(line, PaceRow) for line in read_lines(run.store, run.layout.paces)]
    assert [row.step for row in rows] == [1, 2, 3]
    for row in rows:
        assert row.bursts is not None
        assert row.bursts.updates == row.step * UPDATES
        assert row.bursts.update_s == pytest.approx(STEP_S / UPDATES, rel=0.1)
