"""The live table: what it says of a run whose history is known."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from cells.levels import Level
from cells.scheduler import Role
from flows.live import PlainScreen, duration, panel, screen_on, sparkline
from flows.watch import Watch
from storage.journal import Journal, append_line, read_journal
from storage.records import decode, encode
from storage.run import Run
from tests.flows.recorded import (
    CAPACITY,
    EVALUATION_S,
    QUERIES,
    STEP_S,
    STEPS,
    UPDATES,
    record_run,
)

DONE = 3


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """A clock that stands still."""
    moment = time.time()
    monkeypatch.setattr("flows.watch.time.time", lambda: moment)
    return moment


@pytest.fixture
def running(tmp_path: Path, now: float) -> Run:
    """Three steps are done, the fourth runs for ten seconds."""
    run = record_run(tmp_path, began=now - EVALUATION_S - DONE * STEP_S - 10, steps=DONE)
    sampled = decode(read_journal(run.store, run.layout.levels)[-1], Level).tokens_out
    note(run, now - 10, queued=8, running=16, tokens=sampled)
    # The oldest row that counts for the rate is one of the training before, 14 seconds ago.
    note(run, now, queued=3, running=13, tokens=sampled + 14 * 250)
    return run


def note(run: Run, at: float, *, queued: int, running: int, tokens: int) -> None:
    level = Level(
        at=at,
        step=DONE,
        version=DONE * UPDATES,
        queued=queued,
        running=running,
        capacity=2 * CAPACITY,
        roles={"a": Role.ROLLOUT, "b": Role.SWITCHING},
        expected=4,
        sealed=0,
        claimed=0,
        tokens_out=tokens,
    )
    journal = Journal(run.store, run.layout.levels)
    journal.append([encode(level)])
    journal.close()


def drawn(run: Run) -> str:
    console = Console(file=io.StringIO(), width=110)
    watch = Watch(run)
    watch.flow_run("Running", time.time() - 125)
    console.print(panel(watch.picture()))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_everything_that_counts_is_on_it(running: Run) -> None:
    text = drawn(running)
    for said in (
        "recorded",
        "4 of 6, 0 of 2 updates, rollouts",
        "13 running, 3 waiting, 16 places",
        "a ● rollout",
        "b ● switching",
        "0.450",  # pass rate of the last update
        "(version 0)",
        "1.00 mean, 1 at most",
        "gradient norm 0.2, clipped 10% (4% below, 6% above), effective samples 90%",
        f"1 of {QUERIES // UPDATES} groups",  # the line is folded
        "1.0e-02 mean, 1.0e-01 at most; version 4 1.0e-02",
        "250 sampled",
        "1,000 trained",
        "running for 2 min 05 s",
        "at the pace of 3 steps",
    ):
        assert said in text


def test_time_left_is_what_the_finished_steps_took(running: Run, now: float) -> None:
    left = Watch(running).picture().left
    assert left is not None
    # A step ends with its last update, seconds before the next begins.
    step = STEP_S - 2.0
    ahead = (STEPS - DONE) * step - 10
    assert left.seconds == pytest.approx(ahead + (EVALUATION_S - 1), abs=0.01)
    assert left.steps == DONE


def test_before_the_first_step_nothing_is_promised(tmp_path: Path, now: float) -> None:
    run = record_run(tmp_path, began=now - EVALUATION_S, steps=0)
    assert Watch(run).picture().left is None
    assert "time left is known after the first step" in drawn(run)
    assert "evaluating version 0" in drawn(run)


def test_a_manager_that_ended_long_ago_is_not_shown_as_if_it_lived(tmp_path: Path) -> None:
    run = record_run(tmp_path, began=1_700_000_000.0, steps=DONE)
    picture = Watch(run).picture()
    assert picture.level is None and picture.left is None
    assert "between steps" in drawn(run)


def test_a_cell_that_failed_is_missed(running: Run) -> None:
    journal = Journal(running.store, running.layout.levels)
    last = Watch(running).picture().level
    assert last is not None
    journal.append([encode(last.model_copy(update={"roles": {"a": Role.ROLLOUT}}))])
    journal.close()
    assert "b failed" in drawn(running)


def test_news_comes_once(running: Run) -> None:
    watch = Watch(running)
    assert watch.read() == ([], [])
    update = watch.picture().updates[-1].model_copy(update={"step": DONE, "update": 0})
    append_line(running.store, running.layout.metrics, encode(update))
    evaluation = watch.picture().evaluations[0].model_copy(update={"version": 7})
    running.store.write_record(running.layout.evaluation(7), evaluation)
    running.store.write_record(running.layout.evaluation(7, "-p3-n1-r1"), evaluation)
    assert watch.read() == ([update], [evaluation])
    assert watch.read() == ([], [])


def test_warm_start_is_shown_before_there_is_anything_else(tmp_path: Path, now: float) -> None:
    run = record_run(tmp_path, began=1_700_000_000.0, steps=0)
    append_line(run.store, run.layout.log("warm_start"), b"warm start: full 20/300 loss 1.5")
    assert "full 20/300" in drawn(run)


def test_outside_of_a_terminal_there_are_only_lines(running: Run) -> None:
    out = io.StringIO()
    with screen_on(Console(file=out, width=80)) as screen:
        assert isinstance(screen, PlainScreen)
        screen.say("x" * 100)
        screen.show(Watch(running).picture())
    assert out.getvalue() == "x" * 100 + "\n"


def test_in_a_terminal_lines_stay_above_the_table(running: Run) -> None:
    out = io.StringIO()
    with screen_on(Console(file=out, width=110, force_terminal=True, highlight=False)) as screen:
        screen.show(Watch(running).picture())
        screen.say("step 3 update 0")
        screen.show(Watch(running).picture())
    text = out.getvalue()
    assert text.rindex("waterlevel") > text.index("step 3 update 0") > text.index("waterlevel")


@pytest.mark.parametrize(
    ("shares", "line"), [([0.0, 0.5, 1.0], "▁▅█"), ([0.4, 0.4], "▁▁"), ([0.7], "▁")]
)
def test_sparkline(shares: list[float], line: str) -> None:
    assert sparkline(shares) == line


@pytest.mark.parametrize(
    ("seconds", "words"), [(59.4, "59 s"), (60, "1 min 00 s"), (3661, "1 h 01 min")]
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words
