"""The bar of a step: what it says, how seldom, and that a silent server is no failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from httpx import ConnectError

from cells.board import Board
from flows import progress
from flows.plan import step_plan
from flows.progress import ProgressBar, step_bar
from flows.rollouts import label, living
from storage.records import StepDone
from tests.flows.recorded import MEMBERS, QUERIES, UPDATES, record_run


class Shown:
    """Stands in for Prefect's artifacts."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, str]] = []
        self.key = ""

    def create(self, share: float, key: str, words: str) -> UUID:
        self.key = key
        self.rows.append((share, words))
        return uuid4()

    def update(self, artifact: UUID, share: float, words: str) -> None:
        self.rows.append((share, words))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(progress, "create_progress_artifact", shown.create)
    monkeypatch.setattr(progress, "update_progress_artifact", shown.update)
    return shown


def test_half_of_a_step_is_its_executions_and_half_its_updates(
    tmp_path: Path, shown: Shown
) -> None:
    run = record_run(tmp_path, "My_Run", steps=1)
    queries = step_plan(run, 0, 0).queries
    total = QUERIES * MEMBERS
    board = Board(live=[f"x{n}" for n in range(total)], serve_version=0)
    with step_bar(run, 0, queries, board):
        for number in range(total):
            board.execution_ended(f"x{number}")
        for update in range(UPDATES):
            run.store.write_record(
                run.layout.update(0, update), StepDone(step=0, policy_version=1, seconds=1)
            )
    assert shown.key == "progress-run-my-run"
    first, *_, last = shown.rows
    assert first == (0, f"step 1 of 6: 0 of {total} executions ended, 0 of {UPDATES} updates "
                        f"trained")  # fmt: skip
    assert last[0] == 100 and f"{total} of {total} executions" in last[1]


def test_nothing_is_told_where_nothing_changed(shown: Shown) -> None:
    with ProgressBar("key", lambda: (0.5, "half")):
        pass
    assert shown.rows == [(50, "half")]


def test_what_is_cancelled_waits_for_no_bar(shown: Shown) -> None:
    shares = iter([0.0, 1.0])
    with pytest.raises(KeyboardInterrupt), ProgressBar("key", lambda: (next(shares), "")):
        raise KeyboardInterrupt
    assert len(shown.rows) == 1


def test_a_silent_server_costs_the_picture_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConnectError("no server")

    monkeypatch.setattr(progress, "create_progress_artifact", refuse)
    with ProgressBar("key", lambda: (0.5, "half")):
        done = True
    assert done


def test_a_task_is_named_after_its_executions(tmp_path: Path) -> None:
    run = record_run(tmp_path, steps=1)
    first, *_, last = step_plan(run, 0, 0).queries
    assert label((first,)) == "s00000-q0000-e000 to e003"
    assert label((first, last)) == "s00000-q0000-e000 to s00000-q0003-e003"
    assert not living(run, (first, last))
