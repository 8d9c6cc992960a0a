"""The manager against cells and a gateway that answer as the real ones do, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from cells import roster
from cells.board import Board, Outlook
from cells.client import DaemonClient, DaemonError, DaemonGoneError, FencedError
from cells.decisions import ALL_CELLS, Decision
from cells.levels import Level
from cells.manager import Manager
from cells.roster import NoCellsError
from cells.scheduler import (
    Move,
    Pace,
    Pacing,
    Pipeline,
    Policy,
    Role,
    Snapshot,
    TrainingWork,
    make_policy,
)
from configs.run import RunConfig
from storage.journal import read_journal
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import decode

LIMIT_S = 20


class FakeCell:
    """Roles, versions and epochs of a cell host."""

    def __init__(self, name: str, *, role: str = "rollout", version: int = 0) -> None:
        self.name = f"cell-{name}"
        self.role = role
        self.engine = self.replica = version
        self.epoch = 1
        self.fail_role: str | None = None
        self.failures = 1_000_000
        self.gone = False
        self.calls: list[str] = []

    def call(
        self, method: str, path: str, body: Any = None, *, limit_s: float = 0, params: Any = None
    ) -> dict[str, Any]:
        if self.gone:
            raise DaemonGoneError(f"{self.name}: connection refused")
        if path != "/status":
            self.calls.append(f"{path} {body.get('role', '')}".strip())
        if path == "/role":
            if self.fail_role == body["role"] and self.failures:
                self.failures -= 1
                raise DaemonError("the engine does not get idle")
            self.role = body["role"]
            if body["version"] is not None:
                self.engine = body["version"]
            return {}
        if path == "/replica/publish":
            return {"descriptor": {"version": self.replica}}
        if path == "/replica/pull":
            self.replica = body["args"]["descriptor"]["version"]
            return {"version": self.replica}
        return {
            "role": self.role,
            "epoch": self.epoch,
            "engine": {"url": f"http://{self.name}", "version": self.engine, "token": "t"},
            "replica": {"version": self.replica},
            "detail": "",
        }


class FakeGateway:
    """Which cells the gateway was told about."""

    def __init__(self) -> None:
        self.cells: dict[str, str] = {}
        self.told: list[tuple[str, str, int]] = []

    def call(
        self, method: str, path: str, body: Any = None, *, limit_s: float = 0, params: Any = None
    ) -> dict[str, Any]:
        name = path.rsplit("/", 1)[-1]
        if method == "PUT":
            self.cells[name] = body["state"]
            self.told.append((name, body["state"], body["version"]))
        if method == "DELETE":
            self.cells.pop(name, None)
        cells = {
            name: {"live": 0, "in_flight": 0, "state": told} for name, told in self.cells.items()
        }
        return {"cells": cells, "waiting": 0, "calls": 1, "tokens_out": 7}


class Rig:
    """A manager on two fake cells, in a thread."""

    def __init__(
        self,
        folder: Path,
        *,
        live: int,
        version: int = 0,
        policy: Policy | None = None,
        expected: int = 0,
        newer: bool = False,
        **cells: FakeCell,
    ) -> None:
        self.cells = {"a": FakeCell("a"), "b": FakeCell("b"), **cells}
        self.gateway = FakeGateway()
        names = (f"e{number}" for number in range(live))
        self.board = Board(live=names, serve_version=version, expected=expected, newer=newer)
        self.decisions: list[Decision] = []
        self.decided = threading.Condition()
        config = RunConfig.model_validate({"cells": {"decide_every_s": 0.05, "switch_limit_s": 1}})
        self.manager = Manager(
            store=Store(folder),
            layout=RunLayout("r"),
            config=config,
            cells=cast(dict[str, DaemonClient], self.cells),
            gateway=cast(DaemonClient, self.gateway),
            policy=policy or make_policy("colocate"),
            board=self.board,
            step=0,
            epoch=1,
            report=self._report,
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.manager.run()
        except BaseException as error:
            self.error = error

    def _report(self, decision: Decision) -> None:
        with self.decided:
            self.decisions.append(decision)
            self.decided.notify_all()

    def wait_decisions(self, count: int) -> None:
        with self.decided:
            assert self.decided.wait_for(lambda: len(self.decisions) >= count, LIMIT_S)

    def wait_roles(self, role: Role, count: int) -> None:
        for _ in range(200):
            if sum(cell.role is role for cell in self.board.cells()) >= count:
                return
            self.board.wait_change(0.1)
        raise AssertionError(f"roles stayed {[(c.name, c.role) for c in self.board.cells()]}")

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait for something, beside a training that holds no replica."""
        for _ in range(200):
            if ready():
                return
            self.board.set_held(frozenset())
            self.board.wait_change(0.1)
        raise AssertionError(f"it did not come: {self.gateway.cells}")

    def end(self) -> None:
        self.board.stop()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


def test_colocate_switches_all_cells_and_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, live=3)
    rig.board.wait_serving(LIMIT_S)
    rig.board.set_work(TrainingWork(expected=4))
    rig.board.execution_ended("e0")
    rig.board.execution_ended("e0")
    rig.board.execution_ended("e1")
    assert rig.decisions == []
    rig.board.execution_ended("e2")
    rig.wait_roles(Role.TRAINING, 2)
    assert rig.board.trainers() == ("a", "b")
    assert rig.gateway.cells == {"a": "leaving", "b": "leaving"}
    rig.board.set_work(TrainingWork())
    rig.wait_roles(Role.ROLLOUT, 2)
    rig.end()
    assert rig.error is None
    assert rig.gateway.cells == {"a": "serving", "b": "serving"}
    assert [decision.to for decision in rig.decisions] == ["training"] * 2 + ["rollout"] * 2
    assert all(decision.reason and not decision.failed for decision in rig.decisions)
    rows = read_journal(Store(tmp_path), RunLayout("r").levels)
    seen = [tuple(decode(row, Level).roles.values()) for row in rows]
    assert seen[0] == (Role.ROLLOUT,) * 2
    assert (Role.TRAINING,) * 2 in seen


def test_cells_that_trained_get_the_new_version_from_the_core(tmp_path: Path) -> None:
    cells = {
        "a": FakeCell("a", role="training"),
        "b": FakeCell("b", role="training"),
    }
    cells["a"].replica = 4
    rig = Rig(tmp_path, live=1, version=4, **cells)
    rig.wait_roles(Role.ROLLOUT, 2)
    rig.end()
    assert cells["b"].replica == 4
    assert cells["a"].engine == cells["b"].engine == 4
    assert "/replica/pull" not in cells["a"].calls


def test_a_serving_cell_with_old_weights_is_renewed_before_it_is_used(tmp_path: Path) -> None:
    rig = Rig(tmp_path, live=1, version=2, a=FakeCell("a", version=2), b=FakeCell("b", version=1))
    rig.wait_roles(Role.ROLLOUT, 2)
    rig.end()
    assert rig.cells["b"].engine == 2
    assert [decision.cell for decision in rig.decisions] == ["b"]


def test_a_serving_cell_gives_its_executions_up_before_it_loads_newer_weights(
    tmp_path: Path,
) -> None:
    """The core has trained another update by the time that the cell pulls: its weights are served
    when they may be."""
    cells = {"a": FakeCell("a", role="training", version=1), "b": FakeCell("b", version=1)}
    policy = make_policy("adaptive")
    rig = Rig(tmp_path, live=1, version=1, expected=4, policy=policy, newer=True, **cells)
    rig.board.set_outlook(Outlook(Pacing(Pace.CARRY, 4, 1, "")))
    rig.until(lambda: rig.gateway.cells.get("b") == "serving")
    told = len(rig.gateway.told)
    cells["a"].replica = 3
    rig.board.serve(2)
    rig.until(lambda: "/replica/pull" in cells["b"].calls)
    assert cells["b"].engine == 1
    rig.board.serve(3)
    rig.until(lambda: len(rig.gateway.told) >= told + 2)
    rig.end()
    assert rig.gateway.told[told:] == [("b", "leaving", 1), ("b", "serving", 3)]
    assert cells["b"].engine == 3
    chosen, renewed = rig.decisions
    assert (chosen.cell, chosen.to, chosen.failed) == (ALL_CELLS, "carry", "")
    assert (renewed.cell, renewed.to, renewed.failed) == ("b", "rollout", "")
    assert "reroute" in renewed.parts


def test_a_satellite_that_fails_is_left_out(tmp_path: Path) -> None:
    broken = FakeCell("b")
    broken.fail_role = "training"
    rig = Rig(tmp_path, live=0, b=broken)
    rig.board.set_work(TrainingWork(expected=1))
    rig.wait_decisions(3)
    assert rig.board.trainers() in {(), ("a",)}
    rig.wait_roles(Role.TRAINING, 1)
    rig.end()
    assert rig.error is None
    assert "b" not in rig.gateway.cells
    assert any("does not get idle" in decision.failed for decision in rig.decisions)


def test_without_the_core_everybody_who_waits_gets_the_reason(tmp_path: Path) -> None:
    broken = FakeCell("a")
    broken.fail_role = "training"
    rig = Rig(tmp_path, live=0, a=broken)
    rig.board.set_work(TrainingWork(expected=1))
    rig.thread.join(LIMIT_S)
    assert isinstance(rig.error, NoCellsError)
    with pytest.raises(NoCellsError, match="does not get idle"):
        rig.board.check()


def test_a_fenced_manager_stops(tmp_path: Path) -> None:
    rig = Rig(tmp_path, live=1)
    rig.board.wait_serving(LIMIT_S)
    rig.cells["b"].epoch = 2
    rig.thread.join(LIMIT_S)
    assert isinstance(rig.error, FencedError)
    assert rig.board.stopped


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_manager_that_was_replaced_before_it_began_adopts_nothing(
    tmp_path: Path, name: str
) -> None:
    newer = FakeCell(name)
    newer.epoch = 2
    rig = Rig(tmp_path, live=1, **{name: newer})
    rig.thread.join(LIMIT_S)
    assert isinstance(rig.error, FencedError)
    assert rig.decisions == []


def test_a_restarted_gateway_is_told_of_the_cells_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, live=1)
    rig.board.wait_serving(LIMIT_S)
    rig.gateway.cells.clear()
    rig.until(lambda: rig.gateway.cells == {"a": "serving", "b": "serving"})
    rig.end()
    assert rig.gateway.cells == {"a": "serving", "b": "serving"}


@pytest.mark.parametrize("role", ["failed", "switching"])
def test_a_satellite_that_can_not_be_adopted_is_left_out(tmp_path: Path, role: str) -> None:
    rig = Rig(tmp_path, live=1, b=FakeCell("b", role=role))
    rig.board.wait_serving(LIMIT_S)
    rig.end()
    assert rig.error is None
    assert [cell.name for cell in rig.board.cells()] == ["a"]


def test_a_core_ahead_of_its_step_is_left_as_it_is_when_nothing_lives(tmp_path: Path) -> None:
    """After a kill between an update and the end of its step: only training is left to do."""
    ahead = FakeCell("a", version=2)
    rig = Rig(tmp_path, live=0, version=0, a=ahead, b=FakeCell("b", version=2))
    rig.board.set_work(TrainingWork(expected=1))
    rig.wait_roles(Role.TRAINING, 2)
    rig.end()
    assert rig.error is None
    assert ahead.engine == 2


def test_elastic_trains_on_the_core_while_the_other_cell_serves(tmp_path: Path) -> None:
    rig = Rig(tmp_path, live=3, policy=make_policy("elastic"))
    rig.board.wait_serving(LIMIT_S)
    rig.board.set_work(TrainingWork(expected=6, sealed=2, ready=2))
    rig.wait_roles(Role.TRAINING, 1)
    assert rig.board.trainers() == ("a",)
    assert rig.gateway.cells == {"a": "leaving", "b": "serving"}
    rig.cells["a"].replica = 2
    for name in ("e0", "e1", "e2"):
        rig.board.execution_ended(name)
    rig.board.serve(2)
    rig.board.set_work(TrainingWork())
    assert rig.board.wait_settled(LIMIT_S)
    rig.end()
    assert rig.error is None
    assert {cell.engine for cell in rig.cells.values()} == {2}, "both serve what was trained"
    assert [(d.cell, d.to) for d in rig.decisions if d.to == "training"] == [("a", "training")]


def test_the_core_serves_the_steps_version_again_when_the_other_cell_dies(tmp_path: Path) -> None:
    rig = Rig(tmp_path, live=3, policy=make_policy("elastic"))
    rig.board.wait_serving(LIMIT_S)
    rig.board.set_work(TrainingWork(expected=6, sealed=2, ready=2))
    rig.wait_roles(Role.TRAINING, 1)
    rig.cells["a"].replica = 1  # it has trained an update; its engine still holds version 0
    rig.board.set_work(TrainingWork(expected=4))
    rig.cells["b"].gone = True
    rig.until(lambda: rig.gateway.cells == {"a": "serving"})
    rig.end()
    assert rig.error is None
    assert (rig.cells["a"].engine, "/replica/pull" in rig.cells["a"].calls) == (0, False)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_cell_whose_move_failed_goes_on_and_moves_later(tmp_path: Path, name: str) -> None:
    moody = FakeCell(name)
    moody.fail_role, moody.failures = "training", 2
    rig = Rig(tmp_path, live=0, **{name: moody})
    rig.board.set_work(TrainingWork(expected=1))
    rig.wait_roles(Role.TRAINING, 2)
    rig.end()
    assert rig.error is None
    failed = [decision for decision in rig.decisions if decision.failed]
    assert [decision.cell for decision in failed] == [name] * 2


class _Once:
    """Sends a cell somewhere, once it is told to."""

    name = "once"
    pipeline = Pipeline(lag=0, streaming=True)

    def __init__(self) -> None:
        self.moves: tuple[Move, ...] = ()

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        moves, self.moves = self.moves, ()
        return moves


def test_a_failed_leave_announces_the_cell_again(tmp_path: Path) -> None:
    policy, moody = _Once(), FakeCell("b")
    moody.fail_role = "training"
    rig = Rig(tmp_path, live=1, policy=policy, b=moody)
    rig.board.wait_serving(LIMIT_S)
    policy.moves = (Move("b", Role.TRAINING, "told to"),)
    rig.wait_decisions(1)
    rig.wait_roles(Role.ROLLOUT, 2)
    rig.end()
    assert rig.gateway.cells == {"a": "serving", "b": "serving"}


def test_a_replica_is_put_to_sleep_when_the_training_lets_it_go(tmp_path: Path) -> None:
    policy = _Once()
    rig = Rig(tmp_path, live=1, policy=policy, b=FakeCell("b", role="training"))
    rig.board.set_work(TrainingWork(expected=2, claimed=1))
    rig.wait_roles(Role.TRAINING, 1)
    policy.moves = (Move("b", Role.ROLLOUT, "told to"),)
    rig.wait_roles(Role.SWITCHING, 1)
    rig.board.set_held(frozenset({"b"}))
    assert rig.cells["b"].role == "training"
    rig.until(lambda: rig.cells["b"].role == "rollout")
    rig.end()


def test_a_cell_that_is_well_again_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "REJOIN_EVERY_S", 0)
    rig = Rig(tmp_path, live=1)
    rig.wait_roles(Role.ROLLOUT, 2)
    rig.cells["b"].gone = True
    rig.wait_decisions(1)
    rig.cells["b"].gone = False
    rig.wait_decisions(2)
    rig.wait_roles(Role.ROLLOUT, 2)
    rig.end()
    assert rig.error is None
    assert rig.gateway.cells == {"a": "serving", "b": "serving"}
    assert rig.decisions[-1].reason.startswith("taken back")
