"""What the flow and the manager talk to: executions, cells, state, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cells.body import BodyTooLargeError, read_body
from cells.daemon import Fence, StaleEpochError
from cells.gateway.metrics import Metrics
from cells.gateway.routing import Cell, CellState, Places
from cells.gateway.sessions import EXECUTION_ID, Session, Sessions
from cells.gateway.settling import Settler
from cells.gateway.shards import ShardGoneError, Shards, share
from storage.objects import StorageError
from storage.records import RecordError

LEAVE_LIMIT_S = 10.0
BODY_LIMIT_BYTES = 1 << 20


class OpenBody(BaseModel):
    """How an execution is opened."""

    model_config = ConfigDict(extra="forbid")
    temperature: float = Field(ge=0, le=10)
    policy_version: int = Field(ge=0)
    newer: bool = False


class CellBody(BaseModel):
    """What the manager says about a cell. ``token`` is the bearer token of its engine."""

    model_config = ConfigDict(extra="forbid")
    epoch: int = Field(ge=0)
    url: str = Field(pattern=r"^https?://", max_length=2048)
    capacity: int = Field(ge=0, le=1_000_000)
    version: int = Field(ge=0)
    state: CellState
    token: str | None = Field(None, max_length=4096)


Handler = Callable[[Request], Awaitable[Response]]


class AdminRoutes:
    """The routes under ``/admin`` and ``/metrics``.

    Args:
        authorised: whether a request carries the daemon's token.
        settler: waits until what a cell computed can be had elsewhere; None where it can't.
        shards: the other processes, where this is the first of several.
        gather: adds the metrics of the other processes to this one's.
    """

    def __init__(
        self,
        sessions: Sessions,
        places: Places,
        metrics: Metrics,
        authorised: Callable[[Request], bool],
        settler: Settler | None,
        shards: Shards | None,
        gather: Callable[[bytes], Awaitable[bytes]],
    ) -> None:
        self._shards = shards
        self._gather = gather
        self._sessions = sessions
        self._places = places
        self._metrics = metrics
        self._authorised = authorised
        self._settler = settler
        self._fence = Fence()

    def routes(self) -> list[Route]:
        execution, cell = "/admin/executions/{execution_id}", "/admin/cells/{name}"
        return [
            Route(execution, self._guard(self._owned(self._open)), methods=["PUT"]),
            Route(execution, self._guard(self._owned(self._show)), methods=["GET"]),
            Route(execution, self._guard(self._owned(self._close)), methods=["DELETE"]),
            Route(cell, self._guard(self._put_cell), methods=["PUT"]),
            Route(cell, self._guard(self._delete_cell), methods=["DELETE"]),
            Route("/admin/state", self._guard(self._state), methods=["GET"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
        ]

    def _guard(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            if not self._authorised(request):
                return _error(401, "wrong token")
            try:
                return await handler(request)
            except BodyTooLargeError as error:
                return _error(413, f"{request.url.path}: {error}")
            except ValidationError as error:
                return _error(400, f"{request.url.path}: {error}")
            except StaleEpochError as error:
                return _error(409, f"{request.url.path}: {error}")
            except ShardGoneError as error:
                return _error(503, f"{request.url.path}: {error}")
            except (StorageError, RecordError) as error:
                return _error(500, f"{request.url.path}: {error}")

        return guarded

    def _owned(self, handler: Handler) -> Handler:
        """The handler, in the process that the execution belongs to."""

        async def owned(request: Request) -> Response:
            execution_id = request.path_params["execution_id"]
            name = self._shards.owner(execution_id) if self._shards else None
            if self._shards is None or name is None or not EXECUTION_ID.fullmatch(execution_id):
                return await handler(request)
            path = f"/admin/executions/{execution_id}"
            body = await _json(request) if request.method == "PUT" else None
            status, answer = await self._shards.ask(name, request.method, path, body)
            return JSONResponse(answer, status)

        return owned

    async def _open(self, request: Request) -> Response:
        execution_id = request.path_params["execution_id"]
        if not EXECUTION_ID.fullmatch(execution_id):
            return _error(400, f"execution id {execution_id!r}: letters, digits, '.', '_', '-'")
        body = OpenBody.model_validate(await _json(request))
        session = await self._sessions.start(
            execution_id, body.temperature, body.policy_version, body.newer
        )
        url = f"{str(request.base_url).rstrip('/')}/e/{execution_id}/v1"
        return JSONResponse({"base_url": url, "api_key": session.record.api_key})

    async def _show(self, request: Request) -> Response:
        execution_id = request.path_params["execution_id"]
        await self._sessions.recover(execution_id)
        session = self._sessions.open.get(execution_id)
        if session is not None:
            return JSONResponse(_view(session))
        closed = self._sessions.closed.get(execution_id)
        if closed is None:
            return _unknown(execution_id)
        return JSONResponse(
            {
                "state": "closed",
                "calls": closed.calls,
                "waited_s": closed.waited_s,
                "in_flight": 0,
            }
        )

    async def _close(self, request: Request) -> Response:
        execution_id = request.path_params["execution_id"]
        await self._sessions.recover(execution_id)
        closed = await self._sessions.end(execution_id)
        if closed is None:
            return _unknown(execution_id)
        return JSONResponse({"calls": closed.calls, "waited_s": closed.waited_s})

    async def _put_cell(self, request: Request) -> Response:
        body = CellBody.model_validate(await _json(request))
        self._fence.admit(body.epoch)
        name, shards = request.path_params["name"], self._shards
        told = asyncio.create_task(shards.put_cell(name, body.model_dump())) if shards else None
        cell = self._places.put(
            Cell(
                name=name,
                url=body.url.rstrip("/"),
                capacity=share(body.capacity, shards.count) if shards else body.capacity,
                version=body.version,
                state=body.state,
                token=body.token,
            ),
            settle=self._settler is not None,
        )
        if cell.state is CellState.LEAVING:
            await self._leave(cell)
        others = [answer for status, answer in await told if status == 200] if told else []
        return JSONResponse(_add_views([_cell_view(cell), *others]))

    async def _leave(self, cell: Cell) -> None:
        """Until nothing runs there, and what was computed there can be had elsewhere."""
        try:
            await _quiet(cell)
            if self._settler is not None:
                await self._settler.settle(cell)
        finally:
            self._places.settled(cell)

    async def _delete_cell(self, request: Request) -> Response:
        epoch = request.query_params.get("epoch", "")
        if not epoch.isdigit():
            return _error(400, f"{request.url.path}: epoch must be given as a number in the query")
        self._fence.admit(int(epoch))
        name, shards = request.path_params["name"], self._shards
        told = asyncio.create_task(shards.delete_cell(name, int(epoch))) if shards else None
        cell = self._places.cells.get(name)
        if cell is not None:
            self._places.remove(cell.name)
            await _quiet(cell)
        if told is not None:
            await told
        return JSONResponse({"removed": cell is not None})

    async def _state(self, request: Request) -> Response:
        own: dict[str, Any] = {
            "live": self._places.live(),
            "waiting": self._places.waiting(),
            "open": len(self._sessions.open),
            "tokens_out": self._metrics.total_output,
            "calls": self._metrics.total_calls,
            "longest_wait_s": self._sessions.longest_wait_s(),
            "cells": {cell.name: _cell_view(cell) for cell in self._places.cells.values()},
        }
        if self._shards is None:
            return JSONResponse(own)
        answers = await self._shards.ask_all("GET", "/admin/state")
        states = [own, *(answer for status, answer in answers if status == 200)]
        whole: dict[str, Any] = {
            key: (max if key == "longest_wait_s" else sum)(state[key] for state in states)
            for key in own
            if key != "cells"
        }
        whole["cells"] = {
            name: _add_views([state["cells"][name] for state in states if name in state["cells"]])
            for name in own["cells"]
        }
        return JSONResponse(whole)

    async def _show_metrics(self, request: Request) -> Response:
        text = self._metrics.text()
        if "own" not in request.query_params:
            text = await self._gather(text)
        return Response(text, media_type="text/plain; version=0.0.4")


async def _quiet(cell: Cell) -> None:
    """Until the cell's last generation has ended: the manager may then change its role."""
    with suppress(TimeoutError):
        await asyncio.wait_for(cell.quiet.wait(), LEAVE_LIMIT_S)


async def _json(request: Request) -> Any:
    try:
        return orjson.loads(await read_body(request, BODY_LIMIT_BYTES))
    except orjson.JSONDecodeError:
        return None  # refused by the validation, with the path


def _view(session: Session) -> dict[str, Any]:
    return {
        "state": "open",
        "calls": session.calls,
        "waited_s": session.clock.waited_s(),
        "in_flight": len(session.running),
    }


def _cell_view(cell: Cell) -> dict[str, Any]:
    return {
        "state": cell.state.value,
        "version": cell.version,
        "live": cell.live,
        "in_flight": len(cell.flights),
        "capacity": cell.capacity,
        "tokens": cell.tokens,
    }


def _add_views(views: list[dict[str, Any]]) -> dict[str, Any]:
    """One cell as several processes see it."""
    counted = ("live", "in_flight", "capacity", "tokens")
    sums = {key: sum(view[key] for view in views) for key in counted}
    return {**views[0], **sums}


def _unknown(execution_id: str) -> Response:
    return _error(404, f"execution {execution_id}: never opened here; PUT it first")


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)
