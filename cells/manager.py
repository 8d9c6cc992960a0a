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

from cells.board import Board, CellState
from cells.client import DaemonClient, DaemonError, FencedError
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
    """No cell is left that works."""


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
        self._cells = dict(cells)
        self._core = next(cell.name for cell in config.cells.cells if cell.core)
        self._gateway = gateway
        self._policy = policy
        self._board = board
        self._step = step
        self._epoch = epoch
        self._report = report
        self._journal = Journal(store, layout.decisions)
        self._state: dict[str, CellState] = {}
        self._moving: dict[str, _Moving] = {}
        self._timings = Timings(to_training_s=1.0, to_rollout_s=1.0)
        self._workers = ThreadPoolExecutor(len(cells), thread_name_prefix="switch")

    def run(self) -> None:
        """Until the board is stopped. Moves under way are waited for, to their deadlines.

        Raises:
            FencedError: a newer manager has taken over.
            NoCellsError: every cell has failed.
        """
        try:
            for name in self._cells:
                self._state[name] = self._adopt(name)
            self._board.set_cells(self._state)
            while not self._board.stopped:
                self._finish_moves()
                self._refresh()
                for move in self._policy.decide(self._snapshot()):
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
            self._journal.close()

    def _adopt(self, name: str) -> CellState:
        """The cell as it is; a serving one is made to serve this step's version."""
        status = self._cells[name].call("GET", "/status")
        role = {"rollout": Role.ROLLOUT, "training": Role.TRAINING}.get(status["role"])
        if role is None:
            raise DaemonError(f"{name}: role {status['role']}: {status.get('detail', '')}")
        state = CellState(
            name=name,
            role=role,
            target=None,
            since=time.monotonic(),
            is_core=name == self._core,
            engine_version=status["engine"]["version"],
            replica_version=status["replica"]["version"],
        )
        if role is Role.ROLLOUT:
            if state.engine_version == self._board.serve_version:
                self._announce(name, "serving")
            elif self._board.live > 0:
                move = Move(name, Role.ROLLOUT, "serves an older version")
                self._begin(move, state)
                return self._state[name]
        return state

    def _refresh(self) -> None:
        """Notice cells that died."""
        for name, state in list(self._state.items()):
            if name in self._moving:
                continue
            try:
                status = self._cells[name].call("GET", "/status", limit_s=10)
            except DaemonError as error:
                self._lose(name, str(error))
                continue
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
        with suppress(DaemonError):
            self._gateway.call(
                "DELETE", f"/admin/cells/{name}", params={"epoch": self._epoch}, limit_s=10
            )
        self._record(Move(name, Role.SWITCHING, "left out: the cell has failed"), 0.0, why)
        if name == self._core or not self._state:
            raise NoCellsError(f"cell {name} has failed: {why}")

    def _snapshot(self) -> Snapshot:
        live = max(self._board.live, 0)
        gateway = self._gateway.call("GET", "/admin/state", limit_s=10)
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
        carry = self._to_training if move.to is Role.TRAINING else self._to_rollout
        done = self._workers.submit(carry, move.cell_id)
        self._moving[move.cell_id] = _Moving(move, now, max(self._board.live, 0), done)

    def _finish_moves(self) -> None:
        for name, moving in list(self._moving.items()):
            if not moving.done.done():
                continue
            del self._moving[name]
            now = time.monotonic()
            seconds = now - moving.since
            self._board.add_switch(seconds)
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

    def _to_training(self, name: str) -> None:
        """New calls go elsewhere, running ones are re-issued elsewhere, then the role changes."""
        self._announce(name, "leaving")
        self._set_role(name, "training")

    def _to_rollout(self, name: str) -> None:
        """Weights of the step's version come first, from the core where this cell lacks them."""
        version = self._board.serve_version
        status = self._cells[name].call("GET", "/status")
        if status["engine"]["version"] != version and status["replica"]["version"] != version:
            self._pull(name, version)
        self._set_role(name, "rollout", version)
        self._announce(name, "serving")

    def _pull(self, name: str, version: int) -> None:
        limit = self._config.cells.switch_limit_s
        core = self._cells[self._core]
        published = core.call(
            "POST", "/replica/publish", {"epoch": self._epoch, "args": {}}, limit_s=limit
        )
        answer = self._cells[name].call(
            "POST",
            "/replica/pull",
            {"epoch": self._epoch, "args": {"descriptor": published["descriptor"]}},
            limit_s=limit,
        )
        if answer["version"] != version:
            raise DaemonError(
                f"{name}: pulled version {answer['version']} from the core, the step serves "
                f"version {version}"
            )

    def _set_role(self, name: str, role: str, version: int | None = None) -> None:
        body = {"epoch": self._epoch, "role": role, "version": version}
        limit = self._config.cells.switch_limit_s
        self._cells[name].call("POST", "/role", body, limit_s=limit)

    def _announce(self, name: str, state: str) -> None:
        engine = self._cells[name].call("GET", "/status")["engine"]
        body = {
            "epoch": self._epoch,
            "url": engine["url"],
            "token": engine.get("token"),
            "capacity": self._config.cells.executions_per_cell,
            "version": self._board.serve_version,
            "state": state,
        }
        limit = self._config.cells.switch_limit_s
        self._gateway.call("PUT", f"/admin/cells/{name}", body, limit_s=limit)

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
