"""The long-running loop that moves cells between rollout and training.

Policies decide (`cells.scheduler`); this carries their moves out on real cells, a deadline each,
and records each decision with its reason. A move that fails leaves the cell where its host says
that it is; one that fails again and again, or whose host is silent, is left out until it answers
as it should.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field

from cells.board import Board, CellState
from cells.client import DaemonClient, DaemonError, DaemonGoneError, FencedError
from cells.figures import Figures
from cells.levels import LevelLog
from cells.moves import SILENCE_S, Mover, Parts
from cells.scheduler import (
    CellView,
    Move,
    Policy,
    Role,
    Snapshot,
    VersionBounds,
)
from configs.run import RunConfig
from storage.journal import Journal, read_journal
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Record, decode, encode

FAILURES = 3
"""Failed moves in a row after which a cell is left out."""
REJOIN_EVERY_S = 5.0
"""How often a cell that is left out is asked whether it is well again."""
_CAPACITY_CHANGE = 0.125
"""The gateway is told of a derived capacity when it changed by this share."""


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
    parts: dict[str, float] = Field(default_factory=dict)
    """Seconds by what the move consisted of."""


class NoCellsError(RuntimeError):
    """The core is lost, and with it the weights that the run goes on from."""


@dataclass(frozen=True)
class _Outcome:
    """How a move ended. ``status`` is the host's after a failure; None when it can't be used."""

    parts: Parts = field(default_factory=dict)
    error: DaemonError | None = None
    status: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Moving:
    move: Move
    version: int
    since: float
    waterlevel: int
    done: Future[_Outcome]


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
        self._figures = Figures(config.cells, config.model.context, _earlier_moves(store, layout))
        self._journal = Journal(store, layout.decisions)
        self._levels = LevelLog(store, layout, step)
        self._tokens_out = 0
        self._state: dict[str, CellState] = {}
        self._moving: dict[str, _Moving] = {}
        self._silent: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._out: dict[str, float] = {}
        self._announced: dict[str, int] = {}
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
                self._turn()
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

    def _turn(self) -> None:
        """Look at everything once, and start what follows from it."""
        asked = self._board.asked
        self._finish_moves()
        self._refresh()
        self._rejoin()
        snapshot = self._snapshot()
        self._levels.note(snapshot, self._tokens_out)
        moves = [*self._renewals(), *self._policy.decide(snapshot)]
        for move in moves:
            if move.cell_id not in self._moving:
                self._begin(move)
        self._board.set_cells(self._state, settled=-1 if self._moving else asked)

    def _adopt(self, name: str) -> None:
        """Take the cell as it is; a serving one is made to serve this step's version."""
        try:
            status = self._mover.settled_status(name, self._config.cells.switch_limit_s)
        except FencedError:
            raise  # the cell is well; it is this manager that was replaced
        except DaemonError as error:
            self._lose(name, str(error))
            return
        self._take(name, status)

    def _take(self, name: str, status: dict[str, Any]) -> None:
        """The cell is in a role; the gateway learns of it where it can serve."""
        self._figures.saw_cell(name, status)
        state = CellState(
            name=name,
            role=Role.ROLLOUT if status["role"] == "rollout" else Role.TRAINING,
            target=None,
            since=time.monotonic(),
            is_core=name == self._core,
            engine_version=status["engine"]["version"],
            replica_version=status["replica"]["version"],
        )
        self._state[name] = state
        if self._serves(state):
            self._announce(name)

    def _serves(self, state: CellState) -> bool:
        """Whether the cell can serve what lives now."""
        right = state.engine_version == self._board.serve_version
        return state.role is Role.ROLLOUT and right and self._board.live > 0

    def _renewals(self) -> Iterator[Move]:
        """Serving cells that need other weights. While nothing lives only newer ones are loaded:
        what is left of the step may need no cell any more that serves."""
        version, live = self._board.serve_version, self._board.live
        for state in self._state.values():
            held = state.engine_version
            if state.role is not Role.ROLLOUT or held is None or held == version:
                continue
            if live or held < version:
                yield Move(state.name, Role.ROLLOUT, f"serves version {held} instead of {version}")

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
            self._figures.saw_cell(name, status)
            self._state[name] = replace(
                state,
                engine_version=status["engine"]["version"],
                replica_version=status["replica"]["version"],
            )

    def _lose(self, name: str, why: str) -> None:
        self._state.pop(name, None)
        self._failures.pop(name, None)
        self._out[name] = time.monotonic()
        self._mover.forget(name)
        self._record(Move(name, Role.SWITCHING, "left out: the cell has failed"), 0.0, why)
        if name == self._core:
            raise NoCellsError(f"the core, cell {name}, has failed: {why}")

    def _rejoin(self) -> None:
        """Take back cells that were left out and answer as they should."""
        for name, since in list(self._out.items()):
            if time.monotonic() - since < REJOIN_EVERY_S:
                continue
            self._out[name] = time.monotonic()
            try:
                status = self._mover.status(name)
            except FencedError:
                raise
            except DaemonError:
                continue
            if status["role"] in ("rollout", "training"):
                del self._out[name]
                self._take(name, status)
                to = self._state[name].role
                self._record(Move(name, to, "taken back: the cell is well again"), 0.0, "")

    def _gateway_state(self) -> dict[str, Any]:
        """What the gateway says; a restarted one is told of the serving cells again.

        Raises:
            DaemonError: it is silent for a minute.
        """
        state = self._mover.gateway_state(until=lambda: self._board.stopped)
        self._figures.saw_gateway(state)
        for name, cell in self._state.items():
            if self._serves(cell) and (name not in state["cells"] or self._outgrown(name)):
                self._announce(name)
        return state

    def _outgrown(self, name: str) -> bool:
        told, now = self._announced.get(name), self._figures.capacity(name)
        return told is not None and abs(now - told) > _CAPACITY_CHANGE * told

    def _announce(self, name: str) -> None:
        capacity = self._announced[name] = self._figures.capacity(name)
        self._mover.announce(name, "serving", self._board.serve_version, capacity)

    def _snapshot(self) -> Snapshot:
        live = self._board.live
        gateway = self._gateway_state()
        self._tokens_out = gateway["tokens_out"]
        running = min(live, sum(cell["live"] for cell in gateway["cells"].values()))
        serve = self._board.serve_version
        figures = self._figures
        views = tuple(
            CellView(
                cell_id=state.name,
                role=state.role,
                live=gateway["cells"].get(state.name, {}).get("live", 0),
                is_core=state.is_core,
                capacity=figures.capacity(state.name),
                version=serve if state.engine_version is None else state.engine_version,
                target=state.target,
                since=state.since,
                live_tokens=gateway["cells"].get(state.name, {}).get("tokens", 0),
                token_capacity=figures.token_capacity(state.name),
            )
            for state in self._state.values()
        )
        return Snapshot(
            time=time.monotonic(),
            queued=live - running,
            running=running,
            cells=views,
            training=self._board.work,
            timings=figures.timings,
            versions=VersionBounds(serve, serve),
            queued_tokens=round((live - running) * figures.execution_tokens),
        )

    def _begin(self, move: Move) -> None:
        name, now, version = move.cell_id, time.monotonic(), self._board.serve_version
        self._state[name] = replace(
            self._state[name], role=Role.SWITCHING, target=move.to, since=now
        )
        # Before anything is done: training gives the cell no work from here on.
        self._board.set_cells(self._state)
        done = self._workers.submit(self._carry_out, move, version)
        self._moving[name] = _Moving(move, version, now, self._board.live, done)

    def _carry_out(self, move: Move, version: int) -> _Outcome:
        """In a thread of its own."""
        name, limit_s = move.cell_id, self._config.cells.switch_limit_s
        try:
            if move.to is Role.TRAINING:
                return _Outcome(self._mover.to_training(name))
            # A gradient that is only there goes to the core first. One that does not is lost with
            # the sleep of its replica, and its micro-steps are done again.
            self._board.wait_released(name, self._config.training.micro_step_limit_s)
            capacity = self._announced[name] = self._figures.capacity(name)
            return _Outcome(self._mover.to_rollout(name, version, capacity))
        except FencedError:
            raise
        except DaemonError as error:
            with suppress(DaemonError):
                return _Outcome(error=error, status=self._mover.settled_status(name, limit_s))
            return _Outcome(error=error)

    def _finish_moves(self) -> None:
        for name, moving in list(self._moving.items()):
            if not moving.done.done():
                continue
            del self._moving[name]
            seconds = time.monotonic() - moving.since
            fatal = moving.done.exception()
            if fatal is not None:
                self._record(moving.move, seconds, str(fatal), moving.waterlevel)
                raise fatal
            outcome = moving.done.result()
            failed = str(outcome.error or "")
            self._record(moving.move, seconds, failed, moving.waterlevel, outcome.parts)
            if outcome.error is not None:
                self._repair(name, outcome)
                continue
            self._failures.pop(name, None)
            self._figures.moved(moving.move.to, seconds)
            state = replace(
                self._state[name], role=moving.move.to, target=None, since=time.monotonic()
            )
            if moving.move.to is Role.ROLLOUT:
                state = replace(state, engine_version=moving.version)
            self._state[name] = state

    def _repair(self, name: str, outcome: _Outcome) -> None:
        """After a failed move: the cell goes on in the role that it is in, or is left out."""
        self._failures[name] += 1
        if outcome.status is None or self._failures[name] >= FAILURES:
            self._lose(name, str(outcome.error))
            return
        try:
            self._take(name, outcome.status)
        except DaemonError as error:
            self._lose(name, f"{outcome.error}; after that: {error}")

    def _record(
        self,
        move: Move,
        seconds: float,
        failed: str,
        waterlevel: int = 0,
        parts: Parts | None = None,
    ) -> None:
        decision = Decision(
            at=time.time(),
            step=self._step,
            cell=move.cell_id,
            to=str(move.to),
            reason=move.reason,
            waterlevel=waterlevel,
            seconds=round(seconds, 3),
            failed=failed,
            parts=parts or {},
        )
        self._journal.append([encode(decision)])
        self._report(decision)


def _earlier_moves(store: Store, layout: RunLayout) -> Iterator[tuple[Role, float]]:
    """Moves that earlier managers of the run have carried out, oldest first."""
    for row in read_journal(store, layout.decisions):
        decision = decode(row, Decision, where=layout.decisions)
        if not decision.failed and decision.to in (Role.TRAINING, Role.ROLLOUT):
            yield Role(decision.to), decision.seconds
