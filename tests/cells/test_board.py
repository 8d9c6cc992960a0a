"""What one step's parts tell each other: versions, releases, and when all is done."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from cells.board import Board, Outlook
from cells.scheduler import Pace, Pacing, TrainingWork

LIMIT_S = 20.0


class Waiting:
    """A call that waits, in a thread."""

    def __init__(self, call: Callable[[], bool]) -> None:
        self.found: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.found.append(call()))
        self._thread.start()

    def waits(self) -> bool:
        return not self.found

    def result(self) -> bool:
        self._thread.join(LIMIT_S)
        return self.found[0]


def test_a_new_version_is_served_when_nobody_needs_the_old_one() -> None:
    board = Board(live=["e0", "e1"], serve_version=3)
    board.serve(5)
    board.execution_ended("e0")
    assert board.serve_version == 3
    board.execution_ended("e1")
    assert board.serve_version == 5
    board.serve(6)
    assert board.serve_version == 6


def test_further_executions_need_the_version_of_those_that_live() -> None:
    board = Board(live=["e0"], serve_version=3)
    board.launch(["e1"], 3)
    with pytest.raises(ValueError, match="2 executions still need version 3"):
        board.launch(["e2"], 4)
    board.execution_ended("e0")
    board.execution_ended("e1")
    board.launch(["e2"], 4)
    assert (board.live, board.serve_version) == (1, 4)


def test_newer_weights_serve_at_once_where_they_may() -> None:
    board = Board(live=["e0"], serve_version=3, newer=True)
    board.serve(4)
    assert board.serve_version == 4
    board.launch(["e1"], 4)
    assert board.live == 2


def test_the_oldest_group_is_as_old_as_updates_were_trained_since_its_launch() -> None:
    board = Board(live=["e0"], serve_version=3, newer=True)
    pacing = Pacing(Pace.CARRY, 4, 1, "")
    assert (board.oldest, board.pace) == (0, Pace.BURST)
    board.set_outlook(Outlook(pacing, oldest=2))
    board.updated(4)
    assert (board.oldest, board.updates, board.pace) == (2, 1, Pace.CARRY)
    board.set_outlook(Outlook(pacing))
    assert board.oldest == 0


def test_weights_that_are_not_to_be_served_yet_are_waited_for() -> None:
    board = Board(live=["e0"], serve_version=3, newer=True)
    assert not board.await_serve_version(4, 0.01)
    waiting = Waiting(lambda: board.await_serve_version(4, LIMIT_S))
    board.serve(4)
    assert waiting.result()
    waiting = Waiting(lambda: board.await_serve_version(5, LIMIT_S))
    board.stop()
    assert not waiting.result()


def test_a_cell_is_released_when_training_says_so_again() -> None:
    board = Board(live=[], serve_version=0)
    board.set_work(TrainingWork(expected=2))
    board.set_held(frozenset())
    assert not board.wait_released("b", 0.01), "it said so before, and may have given work since"
    waiting = Waiting(lambda: board.wait_released("b", LIMIT_S))
    for _ in range(3):
        board.set_held(frozenset({"b"}))
        assert waiting.waits()
    while waiting.waits():
        board.set_held(frozenset({"a"}))
    assert waiting.result()


@pytest.mark.parametrize("how", ["over", "stopped", "failed"])
def test_nobody_waits_for_a_training_that_is_over(how: str) -> None:
    board = Board(live=[], serve_version=0, expected=1)
    board.set_held(frozenset({"b"}))
    waiting = Waiting(lambda: board.wait_released("b", LIMIT_S))
    if how == "over":
        board.set_work(TrainingWork())
    elif how == "stopped":
        board.stop()
    else:
        board.fail(RuntimeError("no"))
    assert waiting.result()


def test_a_release_has_a_deadline() -> None:
    board = Board(live=[], serve_version=0, expected=1)
    assert not board.wait_released("b", 0.01)


def test_settled_counts_only_when_it_was_seen_after_the_last_change() -> None:
    board = Board(live=[], serve_version=0)
    board.set_cells({}, settled=board.asked)
    assert board.wait_settled(0.01)
    before = board.asked
    board.serve(1)
    board.set_cells({}, settled=before)
    assert not board.wait_settled(0.01), "the manager had not seen the new version"
    board.set_cells({}, settled=-1)
    assert not board.wait_settled(0.01), "a cell is switching"
    waiting = Waiting(lambda: board.wait_settled(LIMIT_S))
    board.set_cells({}, settled=board.asked)
    assert waiting.result()


def test_what_is_over_never_settles() -> None:
    board = Board(live=[], serve_version=0)
    board.stop()
    assert not board.wait_settled(LIMIT_S)
