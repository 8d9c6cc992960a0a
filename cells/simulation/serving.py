"""A serving cell in virtual time: processor sharing whose speed falls with the requests."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

import simpy

from cells.simulation.workload import ServingModel


class Request:
    """A model call on a cell; `done` gives the work that is left, zero unless it was aborted."""

    __slots__ = ("active", "done", "finish")

    def __init__(self, env: simpy.Environment, finish: float) -> None:
        """`finish` is the cell's progress, in output tokens, at which the request has ended."""
        self.done = env.event()
        self.finish = finish
        self.active = True


class ServingCell:
    """Serves requests together, each at `ServingModel.speed(n)`.

    All requests progress alike, so that one number, the progress of a request that has been there
    since the beginning, says when each ends: it is the classic virtual time of processor sharing
    (Kleinrock, Queueing Systems II, 1976). An arrival or departure costs O(log n).
    """

    def __init__(self, env: simpy.Environment, model: ServingModel) -> None:
        """An idle cell."""
        self._env = env
        self._model = model
        self._progress = 0.0
        self._updated = 0.0
        self._active = 0
        self._heap: list[tuple[float, int, Request]] = []
        self._order = count()
        self._wake_at = float("inf")

    def submit(self, work: float) -> Request:
        """Start a request of `work` output tokens."""
        self._advance()
        request = Request(self._env, self._progress + work)
        heappush(self._heap, (request.finish, next(self._order), request))
        self._active += 1
        self._arm()
        return request

    def abort(self, request: Request) -> None:
        """Stop a request; its waiter receives the work that is left. One that ended is ignored."""
        if not request.active:
            return
        self._advance()
        request.active = False
        self._active -= 1
        request.done.succeed(max(request.finish - self._progress, 0.0))
        self._arm()

    def _advance(self) -> None:
        now = self._env.now
        if self._active:
            self._progress += (now - self._updated) * self._model.speed(self._active)
        self._updated = now

    def _arm(self) -> None:
        """Wake when the first request ends; an earlier wake-up that is still due will re-arm."""
        heap = self._heap
        while heap and not heap[0][2].active:
            heappop(heap)
        if not heap:
            return
        wait = max(heap[0][0] - self._progress, 0.0) / self._model.speed(self._active)
        if self._env.now + wait < self._wake_at:
            self._wake_at = self._env.now + wait
            self._env.timeout(wait).callbacks.append(self._wake)

    def _wake(self, _event: simpy.Event) -> None:
        if self._env.now < self._wake_at:
            return
        self._wake_at = float("inf")
        self._advance()
        heap = self._heap
        # Rounding may leave a sliver of a token, which no clock could tell from zero.
        reached = self._progress + 1e-6
        while heap and (heap[0][0] <= reached or not heap[0][2].active):
            request = heappop(heap)[2]
            if request.active:
                request.active = False
                self._active -= 1
                request.done.succeed(0.0)
        self._arm()
