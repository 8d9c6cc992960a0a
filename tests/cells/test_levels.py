"""The journal of the waterlevel: rows when something changed, not more than one a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells import levels
from cells.levels import LARGEST_GAP_S, Level, LevelLog
from cells.scheduler import CellView, Role, Snapshot, TrainingWork, VersionBounds
from storage.journal import read_journal
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import decode

LAYOUT = RunLayout("r")


class Clock:
    """Stands where the module ``time`` stands."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(levels, "time", clock)
    return clock


def snapshot(running: int, role: Role = Role.ROLLOUT) -> Snapshot:
    target = Role.TRAINING if role is Role.SWITCHING else None
    serving = CellView("a", Role.ROLLOUT, live=running, is_core=True, capacity=4, version=3)
    other = CellView("b", role, live=0, is_core=False, capacity=4, version=3, target=target)
    return Snapshot(
        time=0.0,
        queued=2,
        running=running,
        cells=(serving, other),
        training=TrainingWork(expected=5, sealed=2, claimed=1),
        versions=VersionBounds(3, 3),
    )


def rows(store: Store) -> list[Level]:
    return [decode(line, Level) for line in read_journal(store, LAYOUT.levels)]


def test_a_row_says_what_the_manager_saw(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path)
    log = LevelLog(store, LAYOUT, step=7)
    log.note(snapshot(3, Role.SWITCHING), tokens_out=11)
    assert rows(store) == [
        Level(
            at=1000.0,
            step=7,
            version=3,
            queued=2,
            running=3,
            capacity=4,
            roles={"a": Role.ROLLOUT, "b": Role.SWITCHING},
            expected=5,
            sealed=2,
            claimed=1,
            tokens_out=11,
        )
    ]


def test_rows_are_apart_unless_a_role_changes(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path)
    log = LevelLog(store, LAYOUT, step=0)
    log.note(snapshot(3), 0)
    clock.now += 0.4
    log.note(snapshot(2), 0)  # too soon
    clock.now += 0.4
    log.note(snapshot(2, Role.SWITCHING), 0)
    clock.now += 1.0
    log.note(snapshot(2, Role.SWITCHING), 0)  # no news
    clock.now += 1.0
    log.note(snapshot(2, Role.SWITCHING), 5)
    clock.now += LARGEST_GAP_S
    log.note(snapshot(2, Role.SWITCHING), 5)  # the manager lives
    assert [round(row.at - 1000, 3) for row in rows(store)] == [0, 0.8, 2.8, 32.8]


def test_an_object_store_gets_few_objects_and_loses_nothing(clock: Clock) -> None:
    store = Store("memory://levels")
    log = LevelLog(store, LAYOUT, step=0)
    for second in range(70):
        clock.now = 1000.0 + second
        log.note(snapshot(1), second)
    log.close()
    assert [row.tokens_out for row in rows(store)] == list(range(70))
    assert len(store.keys(LAYOUT.levels)) == 3
    store.delete("runs")
