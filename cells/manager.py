"""The long-running loop that moves cells between rollout and training.

Policies decide (`cells.scheduler`); this carries their moves out on real cells, a deadline each,
and records each decision with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cells.board import Board, CellState
from cells.client import DaemonClient, DaemonError, DaemonGoneError, FencedError
from cells.levels import LevelLog
from cells.moves import SILENCE_S, Mover
from cells.scheduler import (
    CellView,
    Move,
    Policy,
    Role,
    Snapshot,
    Timings,
    VersionBounds,
)
from configs.run import RunConfig
from storage.journal import Journal
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Record, encode

_SMOOTHING = 0.5
"""Weight of the newest measurement in the running means of switch times."""
_SETTLE_POLL_S = 0.2


class Decision(Record):
    """One row of the decisions journal."""

    at: float
    step: int
    cell: str
    to: str
    reason: str
    waterlevel: int
    seconds: float
    failed: str
    """Empty, or what went wrong with the move."""


class NoCellsError(RuntimeError):
    """The core is lost, and with it the weights that the run goes on from."""


@dataclass
class _Moving:
    move: Move
    since: float
    waterlevel: int
    done: Future[None]


class Manager:
    """Carries out a policy's moves until its board is stopped.

    Args:
        cells: clients of the cell hosts by cell name.
        gateway: client of the gateway; it learns which cells serve.
        epoch: this manager's fencing number.
        report: called with each decision when its move has ended.
    """

    def __init__(
        self,
        *,
        store: Store,
        layout: RunLayout,
        config: RunConfig,
        cells: Mapping[str, DaemonClient],
        gateway: DaemonClient,
        policy: Policy,
        board: Board,
        step: int,
        epoch: int,
        report: Callable[[Decision], None],
    ) -> None:
        self._config = config
        self._core = next(cell.name for cell in config.cells.cells if cell.core)
        self._mover = Mover(
            store=store,
            layout=layout,
            config=config,
            cells=cells,
            core=self._core,
            gateway=gateway,
            epoch=epoch,
        )
        self._names = tuple(cells)
        self._policy = policy
        self._board = board
        self._step = step
        self._report = report
        self._journal = Journal(store, layout.decisions)
        self._levels = LevelLog(store, layout, step)
        self._tokens_out = 0
        self._state: dict[str, CellState] = {}
        self._moving: dict[str, _Moving] = {}
        self._silent: dict[str, float] = {}
        self._timings = Timings(to_training_s=1.0, to_rollout_s=1.0)
        self._workers = ThreadPoolExecutor(len(cells), thread_name_prefix="switch")

    def run(self) -> None:
        """Until the board is stopped. Moves under way are waited for, to their deadlines.

        Raises:
            FencedError: a newer manager has taken over.
            NoCellsError: the core has failed.
        """
        try:
            for name in self._names:
                self._adopt(name)
            self._board.set_cells(self._state)
            while not self._board.stopped:
                self._finish_moves()
                self._refresh()
                snapshot = self._snapshot()
                self._levels.note(snapshot, self._tokens_out)
                for move in self._policy.decide(snapshot):
                    self._start(move)
                self._board.set_cells(self._state)
                self._board.wait_change(self._config.cells.decide_every_s)
        except BaseException as error:
            self._board.fail(error)
            raise
        finally:
            self._workers.shutdown(wait=True)
            with suppress(NoCellsError, FencedError):
                self._finish_moves()
            self._levels.close()
            self._journal.close()

    def _adopt(self, name: str) -> None:
        """Take the cell as it is; a serving one is made to serve this step's version."""
        try:
            status = self._settled_status(name)
        except FencedError:
            raise  # the cell is well; it is this manager that was replaced
        except DaemonError as error:
            self._lose(name, str(error))
            return
        role = Role.ROLLOUT if status["role"] == "rollout" else Role.TRAINING
        state = CellState(
            name=name,
            role=role,
            target=None,
            since=time.monotonic(),
            is_core=name == self._core,
            engine_version=status["engine"]["version"],
            replica_version=status["replica"]["version"],
        )
        self._state[name] = state
        if role is Role.ROLLOUT and self._board.live > 0:
            if state.engine_version == self._board.serve_version:
                self._mover.announce(name, "serving", self._board.serve_version)
            else:
                self._begin(Move(name, Role.ROLLOUT, "serves an older version"), state)

    def _settled_status(self, name: str) -> dict[str, Any]:
        """The status of a cell when a switch that an earlier manager began has ended.

        Raises:
            DaemonError: it can't be asked, has failed, or goes on switching.
        """
        deadline = time.monotonic() + self._config.cells.switch_limit_s
        while True:
            status = self._mover.status(name)
            if status["role"] in ("rollout", "training"):
                return status
            if status["role"] == "failed" or time.monotonic() > deadline:
                raise DaemonError(f"{name}: role {status['role']}: {status.get('detail', '')}")
            time.sleep(_SETTLE_POLL_S)

    def _refresh(self) -> None:
        """Notice cells that died. One that is only slow gets a minute."""
        for name, state in list(self._state.items()):
            if name in self._moving:
                continue
            try:
                status = self._mover.status(name)
            except FencedError:
                raise
            except DaemonGoneError as error:
                self._lose(name, str(error))
                continue
            except DaemonError as error:
                since = self._silent.setdefault(name, time.monotonic())
                if time.monotonic() - since > SILENCE_S:
                    self._lose(name, str(error))
                continue
            self._silent.pop(name, None)
            if status["role"] == "failed":
                self._lose(name, status.get("detail", ""))
                continue
            self._state[name] = replace(
                state,
                engine_version=status["engine"]["version"],
                replica_version=status["replica"]["version"],
            )

    def _lose(self, name: str, why: str) -> None:
        self._state.pop(name, None)
        self._mover.forget(name)
        self._record(Move(name, Role.SWITCHING, "left out: the cell has failed"), 0.0, why)
        if name == self._core:
            raise NoCellsError(f"the core, cell {name}, has failed: {why}")

    def _gateway_state(self) -> dict[str, Any]:
        """What the gateway says; a restarted one is told of the serving cells again.

        Raises:
            DaemonError: it is silent for a minute.
        """
        state = self._mover.gateway_state(until=lambda: self._board.stopped)
        for name, cell in self._state.items():
            serving = cell.role is Role.ROLLOUT and cell.engine_version == self._board.serve_version
            if serving and self._board.live > 0 and name not in state["cells"]:
                self._mover.announce(name, "serving", self._board.serve_version)
        return state

    def _snapshot(self) -> Snapshot:
        live = self._board.live
        gateway = self._gateway_state()
        self._tokens_out = gateway["tokens_out"]
        running = min(live, sum(cell["live"] for cell in gateway["cells"].values()))
        serve = self._board.serve_version
        views = tuple(
            CellView(
                cell_id=state.name,
                role=state.role,
                live=gateway["cells"].get(state.name, {}).get("live", 0),
                is_core=state.is_core,
                capacity=self._config.cells.executions_per_cell,
                version=serve if state.engine_version is None else state.engine_version,
                target=state.target,
                since=state.since,
            )
            for state in self._state.values()
        )
        return Snapshot(
            time=time.monotonic(),
            queued=live - running,
            running=running,
            cells=views,
            training=self._board.work,
            timings=self._timings,
            versions=VersionBounds(serve, serve),
        )

    def _start(self, move: Move) -> None:
        if move.cell_id not in self._moving:
            self._begin(move, self._state[move.cell_id])

    def _begin(self, move: Move, state: CellState) -> None:
        now = time.monotonic()
        self._state[move.cell_id] = replace(state, role=Role.SWITCHING, target=move.to, since=now)
        if move.to is Role.TRAINING:
            done = self._workers.submit(self._mover.to_training, move.cell_id)
        else:
            version = self._board.serve_version
            done = self._workers.submit(self._mover.to_rollout, move.cell_id, version)
        self._moving[move.cell_id] = _Moving(move, now, self._board.live, done)

    def _finish_moves(self) -> None:
        for name, moving in list(self._moving.items()):
            if not moving.done.done():
                continue
            del self._moving[name]
            now = time.monotonic()
            seconds = now - moving.since
            error = moving.done.exception()
            self._record(moving.move, seconds, str(error or ""), moving.waterlevel)
            if isinstance(error, FencedError):
                raise error
            if error is not None:
                self._lose(name, str(error))
                continue
            self._measure(moving.move.to, seconds)
            self._state[name] = replace(
                self._state[name], role=moving.move.to, target=None, since=now
            )
            if moving.move.to is Role.ROLLOUT:
                self._state[name] = replace(
                    self._state[name], engine_version=self._board.serve_version
                )

    def _measure(self, to: Role, seconds: float) -> None:
        field = "to_training_s" if to is Role.TRAINING else "to_rollout_s"
        old = getattr(self._timings, field)
        mean = _SMOOTHING * seconds + (1 - _SMOOTHING) * old
        self._timings = replace(self._timings, **{field: mean})

    def _record(self, move: Move, seconds: float, failed: str, waterlevel: int = 0) -> None:
        decision = Decision(
            at=time.time(),
            step=self._step,
            cell=move.cell_id,
            to=str(move.to),
            reason=move.reason,
            waterlevel=waterlevel,
            seconds=round(seconds, 3),
            failed=failed,
        )
        self._journal.append([encode(decision)])
        self._report(decision)
