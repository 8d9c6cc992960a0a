"""Which cells there are, as they were last seen: adopted, lost, taken back, told to the gateway."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cells.board import Board, CellState
from cells.client import DaemonError, DaemonGoneError, FencedError
from cells.decisions import DecisionLog
from cells.figures import Figures
from cells.moves import SILENCE_S, Mover
from cells.scheduler import Move, Role

FAILURES = 3
"""Failed moves in a row after which a cell is left out."""
REJOIN_EVERY_S = 5.0
"""How often a cell that is left out is asked whether it is well again."""
_CAPACITY_CHANGE = 0.125
"""The gateway is told of a derived capacity when it changed by this share."""


class NoCellsError(RuntimeError):
    """The core is lost, and with it the weights that the run goes on from."""


class Roster:
    """The cells of one manager. For its thread alone.

    Args:
        core: name of the cell whose loss ends the step.
    """

    def __init__(
        self, *, core: str, board: Board, mover: Mover, figures: Figures, log: DecisionLog
    ) -> None:
        self._core = core
        self._board = board
        self._mover = mover
        self._figures = figures
        self._log = log
        self.states: dict[str, CellState] = {}
        self._silent: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._out: dict[str, float] = {}
        self._announced: dict[str, int] = {}

    def adopt(self, name: str, limit_s: float) -> None:
        """Take a cell as it is, once a switch that is under way has ended.

        Raises:
            FencedError: the cell is well; it is this manager that was replaced.
            NoCellsError: it is the core, and lost.
        """
        try:
            self._take(name, self._mover.settled_status(name, limit_s))
        except FencedError:
            raise
        except DaemonError as error:
            self.lose(name, str(error))

    def begin(self, move: Move) -> None:
        """The cell switches."""
        self.states[move.cell_id] = replace(
            self.states[move.cell_id],
            role=Role.SWITCHING,
            target=move.to,
            since=time.monotonic(),
        )

    def finish(self, move: Move, version: int) -> None:
        """The move is carried out; a cell that serves now serves ``version``."""
        self._failures.pop(move.cell_id, None)
        state = replace(
            self.states[move.cell_id], role=move.to, target=None, since=time.monotonic()
        )
        if move.to is Role.ROLLOUT:
            state = replace(state, engine_version=version)
        self.states[move.cell_id] = state

    def repair(self, name: str, error: DaemonError, status: dict[str, Any] | None) -> None:
        """After a failed move: the cell goes on in the role that it is in, or is left out.

        Args:
            status: what its host says of itself since; None when it is of no use.
        """
        self._failures[name] += 1
        if status is None or self._failures[name] >= FAILURES:
            self.lose(name, str(error))
            return
        try:
            self._take(name, status)
        except FencedError:
            raise
        except DaemonError as worse:
            self.lose(name, f"{error}; after that: {worse}")

    def lose(self, name: str, why: str) -> None:
        """
        Raises:
            NoCellsError: it is the core.
        """
        self.states.pop(name, None)
        self._failures.pop(name, None)
        self._out[name] = time.monotonic()
        self._mover.forget(name)
        self._log.write(Move(name, Role.SWITCHING, "left out: the cell has failed"), failed=why)
        if name == self._core:
            raise NoCellsError(f"the core, cell {name}, has failed: {why}")

    def refresh(self) -> None:
        """Look at every cell that does not switch. One that is only slow gets a minute."""
        for name, state in list(self.states.items()):
            if state.role is Role.SWITCHING:
                continue
            try:
                status = self._mover.status(name)
            except FencedError:
                raise
            except DaemonGoneError as error:
                self.lose(name, str(error))
                continue
            except DaemonError as error:
                since = self._silent.setdefault(name, time.monotonic())
                if time.monotonic() - since > SILENCE_S:
                    self.lose(name, str(error))
                continue
            self._silent.pop(name, None)
            if status["role"] == "failed":
                self.lose(name, status.get("detail", ""))
                continue
            self._figures.saw_cell(name, status)
            self.states[name] = replace(
                state,
                engine_version=status["engine"]["version"],
                replica_version=status["replica"]["version"],
            )

    def rejoin(self) -> None:
        """Take back cells that were left out and answer as they should."""
        for name, since in list(self._out.items()):
            if time.monotonic() - since < REJOIN_EVERY_S:
                continue
            self._out[name] = time.monotonic()
            try:
                status = self._mover.status(name)
                if status["role"] not in ("rollout", "training"):
                    continue
                self._take(name, status)
            except FencedError:
                raise
            except DaemonError:
                continue
            del self._out[name]
            self._log.write(Move(name, Role.SWITCHING, "taken back: the cell is well again"))

    def renewals(self) -> Iterator[Move]:
        """Serving cells that need other weights. While nothing lives only newer ones are loaded:
        what is left of the step may need no cell any more that serves."""
        version, live = self._board.serve_version, self._board.live
        for state in self.states.values():
            held = state.engine_version
            if state.role is not Role.ROLLOUT or held is None or held == version:
                continue
            if live or held < version:
                yield Move(state.name, Role.ROLLOUT, f"serves version {held} instead of {version}")

    def gateway_state(self) -> dict[str, Any]:
        """What the gateway says; a restarted one is told of the serving cells again.

        Raises:
            DaemonError: it is silent for a minute.
        """
        state = self._mover.gateway_state(until=lambda: self._board.stopped)
        self._figures.saw_gateway(state)
        for name, cell in self.states.items():
            if self._serves(cell) and (name not in state["cells"] or self._outgrown(name)):
                self._tell_again(name)
        return state

    def _tell_again(self, name: str) -> None:
        """Announce a cell; one whose host or gateway is silent now is announced later."""
        try:
            self._announce(name)
        except FencedError:
            raise
        except DaemonError:
            self._announced.pop(name, None)

    def capacity_to_announce(self, name: str) -> int:
        """Places of a cell, as the gateway is going to know them."""
        capacity = self._announced[name] = self._figures.capacity(name)
        return capacity

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
        if self._serves(state):
            self._announce(name)
        self.states[name] = state

    def _serves(self, state: CellState) -> bool:
        """Whether the cell can serve what lives now."""
        right = state.engine_version == self._board.serve_version
        return state.role is Role.ROLLOUT and right and self._board.live > 0

    def _outgrown(self, name: str) -> bool:
        told, now = self._announced.get(name), self._figures.capacity(name)
        return told is not None and abs(now - told) > _CAPACITY_CHANGE * told

    def _announce(self, name: str) -> None:
        capacity = self.capacity_to_announce(name)
        self._mover.announce(name, "serving", self._board.serve_version, capacity)
