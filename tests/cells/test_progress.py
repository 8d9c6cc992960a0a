"""A hang ends, and says what each part waits for."""

from __future__ import annotations

import threading

import pytest

from cells.board import Board
from cells.progress import HangError, Progress, ended_when_silent
from cells.scheduler import TrainingWork

LIMIT_S = 60.0


def test_each_part_is_told_with_what_it_waits_for_and_did_last() -> None:
    progress = Progress()
    progress.did("training", "3 micro-steps are left")
    progress.waits("training", "micro_step on b")
    progress.waits("rollout", "2 executions: e0, e1")
    progress.waits("moves", "b to rollout")
    progress.waits("moves", "")
    assert progress.told().splitlines() == [
        "rollout: waits for 2 executions: e0, e1, 0 s",
        "training: waits for micro_step on b, 0 s; last: 3 micro-steps are left, 0 s ago",
    ]


def test_what_is_waited_for_still_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("cells.progress.time.monotonic", lambda: clock[0])
    progress = Progress()
    for clock[0] in (100.0, 130.0, 160.0):
        progress.waits("gateway", "a serving with 3 calls")
    assert progress.told() == "gateway: waits for a serving with 3 calls, 60 s"
    assert progress.silent_s == 60
    progress.did("gateway", "4 calls answered")
    assert progress.silent_s == 0


def test_silence_ends_a_step_once_with_all_that_is_known() -> None:
    board = Board(live=["e0", "e1"], serve_version=0)
    board.set_work(TrainingWork(expected=2))
    ended = threading.Event()

    def end(error: HangError) -> None:
        board.fail(error)
        ended.set()

    with ended_when_silent(board.progress, 0.05, end):
        assert ended.wait(LIMIT_S)
    with pytest.raises(HangError) as caught:
        board.check()
    text = str(caught.value)
    assert text.startswith("nothing has moved for 0.05 s (cells.progress_limit_s):\n")
    assert "rollout: waits for 2 executions: e0, e1" in text
    assert "2 micro-steps are left" in text


def test_what_moves_is_not_ended() -> None:
    board = Board(live=[f"e{number}" for number in range(40)], serve_version=0)
    told: list[HangError] = []
    with ended_when_silent(board.progress, 3600, told.append):
        for number in range(40):
            board.execution_ended(f"e{number}")
    assert told == []
    assert board.progress.silent_s < LIMIT_S
    assert "at work; last: e39 ended" in board.progress.told()
