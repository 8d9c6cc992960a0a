"""The long-running loop that moves cells between rollout and training.

Policies decide (`cells.scheduler`); this carries their moves out on real cells, a deadline each,
and records each decision with its reason. A move that fails leaves the cell where its host says
that it is; one that fails again and again, or whose host is silent, is left out until it answers
as it should (`cells.roster`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cells.board import Board
from cells.client import DaemonClient, DaemonError, FencedError
from cells.decisions import Decision, DecisionLog, earlier_moves
from cells.figures import Figures
from cells.levels import LevelLog
from cells.moves import Mover, Parts
from cells.roster import NoCellsError, Roster
from cells.scheduler import (
    CellView,
    Move,
    Pace,
    Pacing,
    Policy,
    Role,
    Snapshot,
    VersionBounds,
)
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store

_OVERDUE = 0.25
"""Share of the longest time of a call after which one that waits has to be served."""


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
        core = next(cell.name for cell in config.cells.cells if cell.core)
        self._mover = Mover(
            store=store,
            layout=layout,
            config=config,
            cells=cells,
            core=core,
            gateway=gateway,
            epoch=epoch,
        )
        self._names = tuple(cells)
        self._policy = policy
        self._board = board
        self._figures = Figures(config.cells, config.model.context, earlier_moves(store, layout))
        self._log = DecisionLog(store, layout, step, report)
        self._levels = LevelLog(store, layout, step)
        self._roster = Roster(
            core=core, board=board, mover=self._mover, figures=self._figures, log=self._log
        )
        self._moving: dict[str, _Moving] = {}
        self._pacing: Pacing | None = None
        self._answered = (0, 0)
        """Calls and tokens of the gateway up to now."""
        self._workers = ThreadPoolExecutor(len(cells), thread_name_prefix="switch")

    def run(self) -> None:
        """Until the board is stopped. Moves under way are waited for, to their deadlines.

        Raises:
            FencedError: a newer manager has taken over.
            NoCellsError: the core has failed.
        """
        try:
            for name in self._names:
                self._roster.adopt(name, self._config.cells.switch_limit_s)
            self._board.set_cells(self._roster.states)
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
            self._log.close()

    def _turn(self) -> None:
        """Look at everything once, and start what follows from it."""
        asked = self._board.asked
        self._finish_moves()
        self._roster.refresh()
        self._roster.rejoin()
        gateway = self._roster.gateway_state()
        snapshot = self._snapshot(gateway)
        self._levels.note(snapshot, gateway["tokens_out"])
        self._tell(gateway)
        for move in [*self._roster.renewals(), *self._decide(snapshot)]:
            if move.cell_id not in self._moving:
                self._begin(move)
        self._board.set_cells(self._roster.states, settled=-1 if self._moving else asked)

    def _decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        outlook = self._board.outlook
        if outlook is None and self._board.newer:
            return ()  # nothing is launched yet, and what is to be is not known
        if outlook is not None and outlook.pacing != self._pacing:
            # Of a pace that stays only the window moves.
            if self._pacing is None or outlook.pacing.pace is not self._pacing.pace:
                self._log.chose(outlook.pacing, self._board.live)
            self._pacing = outlook.pacing
        return self._policy.decide(snapshot)

    def _tell(self, gateway: dict[str, Any]) -> None:
        """What the gateway and the moves are at, for who looks for a hang."""
        progress, done = self._board.progress, (gateway["calls"], gateway["tokens_out"])
        if done != self._answered:
            progress.did("gateway", f"{done[0]} calls answered, {done[1]} tokens")
        self._answered = done
        cells = ", ".join(
            f"{name} {cell['state']} with {cell['in_flight']} calls of {cell['live']} executions"
            for name, cell in gateway["cells"].items()
        )
        waiting = f"{gateway['waiting']} executions wait for a place" * bool(gateway["waiting"])
        progress.waits("gateway", "; ".join(filter(None, (cells, waiting))))
        moves = [f"{name} to {moving.move.to}" for name, moving in self._moving.items()]
        progress.waits("moves", ", ".join(moves))

    def _snapshot(self, gateway: dict[str, Any]) -> Snapshot:
        live, serve, seen = self._board.live, self._board.serve_version, gateway["cells"]
        running = min(live, sum(cell["live"] for cell in seen.values()))
        figures = self._figures
        views = tuple(
            CellView(
                cell_id=state.name,
                role=state.role,
                live=seen.get(state.name, {}).get("live", 0),
                is_core=state.is_core,
                capacity=figures.capacity(state.name),
                version=serve if state.engine_version is None else state.engine_version,
                target=state.target,
                since=state.since,
                live_tokens=seen.get(state.name, {}).get("tokens", 0),
                token_capacity=figures.token_capacity(state.name),
            )
            for state in self._roster.states.values()
        )
        snapshot = Snapshot(
            time=time.monotonic(),
            queued=live - running,
            running=running,
            cells=views,
            training=self._board.work,
            timings=figures.timings,
            versions=VersionBounds(serve, serve),
            queued_tokens=round((live - running) * figures.execution_tokens),
        )
        outlook = self._board.outlook
        if outlook is None or outlook.pacing.pace is not Pace.CARRY:
            return snapshot
        waits_s = gateway.get("longest_wait_s", 0.0)
        return replace(
            snapshot,
            pace=outlook.pacing.pace,
            serving_cells=outlook.pacing.serving_cells,
            may_wait=outlook.pacing.may_wait,
            oldest=self._board.oldest,
            coming=outlook.coming if snapshot.training.closing else 0,
            last=outlook.last,
            overdue=waits_s > _OVERDUE * self._config.gateway.call_limit_s,
        )

    def _begin(self, move: Move) -> None:
        version = self._board.serve_version
        self._roster.begin(move)
        # Before anything is done: training gives the cell no work from here on.
        self._board.set_cells(self._roster.states)
        capacity = self._roster.capacity_to_announce(move.cell_id)
        done = self._workers.submit(self._carry_out, move, version, capacity)
        since = time.monotonic()
        self._moving[move.cell_id] = _Moving(move, version, since, self._board.live, done)

    def _carry_out(self, move: Move, version: int, capacity: int) -> _Outcome:
        """In a thread of its own."""
        name = move.cell_id
        try:
            if move.to is Role.TRAINING:
                return _Outcome(self._mover.to_training(name))
            # A gradient that is only there goes to the core first. One that does not is lost with
            # the sleep of its replica, and its micro-steps are done again.
            self._board.wait_released(name, self._config.training.micro_step_limit_s)
            ahead = self._board.await_serve_version if self._board.newer else None
            return _Outcome(self._mover.to_rollout(name, version, capacity, ahead))
        except FencedError:
            raise
        except DaemonError as error:
            return _Outcome(error=error, status=self._status_after_failure(name))

    def _status_after_failure(self, name: str) -> dict[str, Any] | None:
        """When a cell is done with going back; None where it does not get so far."""
        try:
            return self._mover.settled_status(name, self._config.cells.switch_limit_s)
        except FencedError:
            raise
        except DaemonError:
            return None

    def _finish_moves(self) -> None:
        for name, moving in list(self._moving.items()):
            if not moving.done.done():
                continue
            del self._moving[name]
            move, seconds = moving.move, time.monotonic() - moving.since
            fatal = moving.done.exception()
            if fatal is not None:
                self._log.write(move, seconds, str(fatal), moving.waterlevel)
                raise fatal
            outcome = moving.done.result()
            failed = str(outcome.error or "")
            self._log.write(move, seconds, failed, moving.waterlevel, outcome.parts)
            if outcome.error is not None:
                self._roster.repair(name, outcome.error, outcome.status)
                continue
            self._figures.moved(move.to, seconds)
            self._roster.finish(move, moving.version)
