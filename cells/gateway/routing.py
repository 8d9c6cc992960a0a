"""Places: which cell serves which execution, and who waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class CellState(StrEnum):
    """Whether a cell takes calls."""

    SERVING = "serving"
    LEAVING = "leaving"


class Abortable(Protocol):
    """A generation that can be told to stop."""

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class Cell:
    """An engine that generations can be sent to.

    ``capacity`` is the most executions that it serves at once; ``version`` is of its weights.
    """

    name: str
    url: str
    capacity: int
    version: int
    state: CellState
    token: str | None = None
    live: int = 0
    """Executions that hold a place here."""
    tokens: int = 0
    """Their contexts together, as of their last calls."""
    flights: set[Abortable] = field(default_factory=set)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no generation runs here."""

    def enter(self, flight: Abortable) -> None:
        self.flights.add(flight)
        self.quiet.clear()

    def leave(self, flight: Abortable) -> None:
        self.flights.discard(flight)
        if not self.flights:
            self.quiet.set()


@dataclass(slots=True, eq=False)
class Seat:
    """One execution's claim to a cell; without a cell it waits in line."""

    holder: str
    version: int
    newer: bool = False
    """Cells with newer weights may serve it as well."""
    cell: Cell | None = None
    tokens: int = 0
    """Of the execution's context, as of its last call."""
    after: Cell | None = None
    """The cell that it lost, while what was computed there can't be had elsewhere yet."""
    bound_for: Cell | None = None
    """A cell with more room that came after it sat down; it goes there before its next call."""
    granted: asyncio.Event = field(default_factory=asyncio.Event)

    def allows(self, version: int) -> bool:
        """Whether weights of that version may serve it."""
        return version == self.version or (self.newer and version > self.version)


class Places:
    """Cells with a limited number of executions each. An execution keeps its cell until it is
    released or the cell goes, or a cell comes (back) that has fewer than its share; those that lost
    their cell are served before those that never had one, and otherwise first come is first served.
    An execution is only placed on a cell with the weights that it was opened with, or with newer
    ones where it was opened so."""

    def __init__(self) -> None:
        self.cells: dict[str, Cell] = {}
        self._seats: dict[str, Seat] = {}
        self._line: list[Seat] = []

    async def place(self, holder: str, version: int, newer: bool = False) -> Cell:
        """The cell of an execution; waits for one as long as it takes."""
        seat = self._seats.get(holder)
        if seat is None:
            seat = Seat(holder, version, newer)
            self._seats[holder] = seat
            self._line.append(seat)
            self._grant()
        while seat.cell is None:
            await seat.granted.wait()
        return seat.cell

    def release(self, holder: str) -> None:
        """Give an execution's place, or its turn in line, to the next."""
        seat = self._seats.pop(holder, None)
        if seat is None:
            return
        if seat.cell is None:
            self._line.remove(seat)
        _sit(seat, None)
        self._grant()

    def avoid(self, holder: str, cell: Cell) -> None:
        """Move an execution off a cell that does not answer, if another one has room."""
        seat = self._seats.get(holder)
        if seat is None or seat.cell is not cell:
            return
        other = self._roomiest(seat, apart_from=cell)
        if other is not None:
            _sit(seat, other)
            self._grant()

    def put(self, cell: Cell, *, settle: bool = False) -> Cell:
        """Take a new cell, or what is new of a known one. A cell that leaves, or that now has other
        weights or another engine, loses its executions and stops their generations.

        Args:
            settle: executions of a cell that leaves get another one when ``settled`` is called.
        """
        known = self.cells.get(cell.name)
        comes = known is None or known.state is CellState.LEAVING
        if known is None:
            cell.quiet.set()
            self.cells[cell.name] = known = cell
        else:
            moved = known.url != cell.url or known.version != cell.version
            known.url, known.version, known.token = cell.url, cell.version, cell.token
            known.capacity, known.state = cell.capacity, cell.state
            if moved:
                comes = True
                self._evict(known)
        if known.state is CellState.LEAVING:
            self._evict(known, settle)
        self._grant()
        if comes and known.state is CellState.SERVING:
            self._spread(known)
        return known

    def settled(self, cell: Cell) -> None:
        """What was computed on a cell that left can be had elsewhere, or is not waited for."""
        for seat in self._line:
            if seat.after is cell:
                seat.after = None
        self._grant()

    def remove(self, name: str) -> None:
        """Forget a cell; its executions move or wait."""
        cell = self.cells.pop(name, None)
        if cell is not None:
            cell.state = CellState.LEAVING
            self._evict(cell)
            self._grant()

    def held(self, holder: str) -> Cell | None:
        """The cell of an execution, if it has one now; asked before each of its calls."""
        seat = self._seats.get(holder)
        if seat is None:
            return None
        target, seat.bound_for = seat.bound_for, None
        if seat.cell is not None and target is not None and self._takes(target, seat):
            _sit(seat, target)
            self._grant()
        return seat.cell

    def note(self, holder: str, tokens: int) -> None:
        """An execution's context has so many tokens after a call."""
        seat = self._seats.get(holder)
        if seat is not None:
            if seat.cell is not None:
                seat.cell.tokens += tokens - seat.tokens
            seat.tokens = tokens

    def live(self) -> int:
        """Executions that hold a place."""
        return len(self._seats) - len(self._line)

    def waiting(self) -> int:
        """Executions in line."""
        return len(self._line)

    def explain(self, version: int) -> str:
        """Why nothing serves, for people."""
        cells = ", ".join(
            f"{cell.name} {cell.state} version {cell.version}, {cell.live} of "
            f"{cell.capacity} places taken"
            for cell in self.cells.values()
        )
        return f"no place on a cell with weights {version}; cells: {cells or 'none'}"

    def _evict(self, cell: Cell, settle: bool = False) -> None:
        lost = [seat for seat in self._seats.values() if seat.cell is cell]
        for seat in lost:
            _sit(seat, None)
            seat.after = cell if settle else None
        self._line[:0] = lost
        for flight in tuple(cell.flights):
            flight.abort()

    def _grant(self) -> None:
        left: list[Seat] = []
        for at, seat in enumerate(self._line):
            if seat.after is not None:
                # Nobody overtakes those who lost their cell: they could find the others full.
                left += self._line[at:]
                break
            cell = self._roomiest(seat)
            if cell is None:
                left.append(seat)
            else:
                _sit(seat, cell)
        self._line = left

    def _takes(self, cell: Cell, seat: Seat) -> bool:
        serves = cell.state is CellState.SERVING and seat.allows(cell.version)
        return serves and self.cells.get(cell.name) is cell and cell.live < cell.capacity

    def _spread(self, fresh: Cell) -> None:
        """Ask executions to move to a cell that came, up to its share by capacity: the ones with
        the shortest contexts of the fullest cell, which carry the least with them. None is
        interrupted for it; each goes when its next call begins."""
        serving = [
            cell
            for cell in self.cells.values()
            if cell.state is CellState.SERVING and cell.version == fresh.version
        ]
        live = sum(cell.live for cell in serving)
        share = live * fresh.capacity // max(1, sum(cell.capacity for cell in serving))
        staying = {cell.name: cell.live for cell in serving}
        seats = sorted(
            (seat for seat in self._seats.values() if seat.cell in serving),
            key=lambda seat: seat.tokens,
        )
        for _ in range(share - fresh.live):
            fullest = max(serving, key=lambda cell: staying[cell.name] / max(1, cell.capacity))
            seat = next((s for s in seats if s.cell is fullest and s.bound_for is None), None)
            if fullest is fresh or seat is None:
                return
            seat.bound_for = fresh
            staying[fullest.name] -= 1

    def _roomiest(self, seat: Seat, apart_from: Cell | None = None) -> Cell | None:
        best: Cell | None = None
        most = 0
        for cell in self.cells.values():
            if cell is apart_from or not self._takes(cell, seat):
                continue
            room = cell.capacity - cell.live
            if room > most:
                best, most = cell, room
        return best


def _sit(seat: Seat, cell: Cell | None) -> None:
    if seat.cell is not None:
        seat.cell.live -= 1
        seat.cell.tokens -= seat.tokens
    seat.cell = cell
    if cell is None:
        seat.granted.clear()
    else:
        cell.live += 1
        cell.tokens += seat.tokens
        seat.granted.set()
