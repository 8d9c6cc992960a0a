"""Rollouts in virtual time: executions queue for a cell, call it, and move on when it leaves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from heapq import heapify, heappop, heapreplace
from typing import Any

import simpy

from cells.scheduler import Role
from cells.simulation.cell import Cell, Session
from cells.simulation.executions import Execution
from cells.simulation.outcome import Ended
from cells.simulation.workload import ServingModel


class SimulationError(RuntimeError):
    """A policy broke a rule: it left live work without a cell that serves, or never ends."""


class Rollout:
    """The queue and the sessions; the part of the gateway that a scheduler depends on."""

    def __init__(
        self,
        env: simpy.Environment,
        cells: tuple[Cell, ...],
        model: ServingModel,
        ended: Callable[[Session], None],
    ) -> None:
        """`ended` is called with each session that has ended."""
        self._env = env
        self._cells = cells
        self._model = model
        self._ended = ended
        self._queue: deque[Session] = deque()
        self.running = 0
        self.begun: dict[int, int] = {}
        """The version under which the first execution of an unsealed query began."""
        self.unsealed: dict[int, list[Session]] = defaultdict(list)
        self.executions: list[Ended] = []

    @property
    def queued(self) -> int:
        """Executions that wait for a cell."""
        return len(self._queue)

    def launch(self, executions: Iterable[Execution], version: int) -> None:
        """Queue executions, and start those for which there is room."""
        for execution in executions:
            session = Session(self._env, execution, version)
            self._queue.append(session)
            self.unsealed[execution.query].append(session)
            self._env.process(self._run(session))
        self.admit()

    def admit(self) -> None:
        """Bind queued executions to the emptiest cells, first come first served."""
        if not self._queue:
            return
        room = [
            (len(cell.sessions) / cell.capacity, number, cell)
            for number, cell in enumerate(self._cells)
            if cell.has_place
        ]
        heapify(room)
        while self._queue and room:
            _, number, cell = room[0]
            self._bind(self._queue.popleft(), cell)
            if len(cell.sessions) < cell.capacity:
                heapreplace(room, (len(cell.sessions) / cell.capacity, number, cell))
            else:
                heappop(room)

    def leave(self, cell: Cell, may_wait: bool = False) -> None:
        """Reroute every session of a cell that serves no longer.

        Where they may wait, those for which no other cell has a place wait for one, before all that
        are queued.

        Raises:
            SimulationError: if no other cell serves and they may not wait.
        """
        waiting: list[Session] = []
        for session in tuple(cell.sessions):
            other = self._emptiest()
            if other is None and not may_wait:
                raise SimulationError(f"{cell.cell_id} left live executions that nobody serves")
            if other is None or (may_wait and len(other.sessions) >= other.capacity):
                waiting.append(session)
                continue
            del cell.sessions[session]
            other.sessions[session] = None
            session.cell = other
            session.reroutes += 1
            session.cold = session.context * (1 - self._model.kv_kept_on_reroute)
            if session.request is not None:
                cell.serving.abort(session.request)
        for session in reversed(waiting):
            self._park(session, cell)

    def _park(self, session: Session, cell: Cell) -> None:
        """Its calls wait until a cell has a place for it; what its tools do goes on."""
        del cell.sessions[session]
        session.cell = None
        session.cold = session.context * (1 - self._model.kv_kept_on_reroute)
        session.parked_at = self._env.now
        session.admitted = self._env.event()
        self.running -= 1
        self._queue.appendleft(session)
        if session.request is not None:
            cell.serving.abort(session.request)

    def renew(self, version: int, pull_s: float) -> None:
        """Serve everything that lives with `version` from now on; serving cells pull it first.

        What a cell holds of a context was computed with other weights, and is computed again.
        """
        for session in self._queue:
            session.version = version
            session.cold = session.context
        for cell in self._cells:
            if cell.role is Role.ROLLOUT:
                cell.version = version
                cell.loaded = self._env.timeout(pull_s)
            for session in cell.sessions:
                session.version = version
                session.cold = session.context
                if session.request is not None:
                    cell.serving.abort(session.request)

    def _emptiest(self) -> Cell | None:
        serving = [cell for cell in self._cells if cell.role is Role.ROLLOUT]
        return min(serving, key=lambda cell: len(cell.sessions) / cell.capacity, default=None)

    def _bind(self, session: Session, cell: Cell) -> None:
        session.cell = cell
        if session.parked_at is None:
            session.started_at = self._env.now
            self.begun.setdefault(session.execution.query, session.version)
        else:
            session.parked_s += self._env.now - session.parked_at
            session.parked_at = None
        cell.sessions[session] = None
        self.running += 1
        session.admitted.succeed()

    def _run(self, session: Session) -> Generator[Any, Any, None]:
        yield session.admitted
        execution = session.execution
        for number, block in enumerate(execution.blocks, start=1):
            yield from self._call(session, block.prompt_tokens, block.output_tokens)
            session.context += block.prompt_tokens + block.output_tokens
            tool_s = block.tool_s
            if execution.cut_s is not None and number == len(execution.blocks):
                tool_s = session.started_at + execution.cut_s - self._env.now
            if tool_s > 0:
                yield self._env.timeout(tool_s)
        self._finish(session)

    def _call(self, session: Session, prompt: float, output: float) -> Generator[Any, Any, None]:
        work = left = self._model.work(prompt, output)
        while left > 0:
            if session.cell is None:
                yield session.admitted
                continue
            if session.cell.loaded is not None and not session.cell.loaded.processed:
                yield session.cell.loaded
                continue
            # After a reroute the part of the context that did not move with it is prefilled again.
            before, version = left, session.version
            left += self._model.work(session.cold, 0.0)
            session.cold = 0.0
            session.request = session.cell.serving.submit(left)
            left = yield session.request.done
            session.request = None
            session.sampled[version] += round(output * max(before - left, 0.0) / work)

    def _finish(self, session: Session) -> None:
        cell = session.cell
        if cell is None:
            assert session.parked_at is not None
            self._queue.remove(session)
            session.parked_s += self._env.now - session.parked_at
        else:
            del cell.sessions[session]
            self.running -= 1
        session.ended_at = self._env.now
        self.executions.append(
            Ended(
                query=session.execution.query,
                active_s=self._env.now - session.started_at - session.parked_s,
                waited_s=session.started_at - session.queued_at,
                reroutes=session.reroutes,
                timed_out=session.execution.timed_out,
            )
        )
        if (
            cell is not None
            and self._queue
            and cell.role is Role.ROLLOUT
            and len(cell.sessions) < cell.capacity
        ):
            self._bind(self._queue.popleft(), cell)
        self._ended(session)
