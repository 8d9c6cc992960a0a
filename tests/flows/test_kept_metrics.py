"""metrics.jsonl has every update's line once and in order, wherever an attempt at it died."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.journal import append_line, read_lines
from storage.records import UpdateMetrics, decode
from tasks.training.task import keep_metrics
from tests.flows.recorded import UPDATES, record_run


@pytest.mark.parametrize("written", range(2 * UPDATES + 1))
def test_lines_that_an_attempt_did_not_come_to_are_added_in_order(
    tmp_path: Path, written: int
) -> None:
    run = record_run(tmp_path, steps=2)
    key = run.layout.metrics
    lines = read_lines(run.store, key)
    for line in lines:
        update = decode(line, UpdateMetrics)
        run.store.write_record_once(run.layout.update(update.step, update.update), update)
    run.store.delete(key)
    for line in lines[:written]:
        append_line(run.store, key, line)

    for step in range(2):
        keep_metrics(run, step, UPDATES)

    assert read_lines(run.store, key) == lines
