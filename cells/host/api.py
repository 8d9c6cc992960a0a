"""The HTTP calls of a cell host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cells.body import BodyTooLargeError, read_body
from cells.daemon import Daemon, StaleEpochError
from cells.host.cell import Cell, SwitchLateError, UnknownCommandError
from cells.host.handover import VersionAbsentError
from cells.host.roles import HostRole, WrongRoleError
from cells.process import cpu_seconds
from cells.replica.client import ReplicaDeadError, ReplicaDeadlineError, ReplicaRefusedError
from cells.serving.engine import EngineError, EngineGoneError, EngineLateError

BODY_LIMIT_BYTES = 8 << 20


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    epoch: int = Field(ge=0)


class _Role(_Body):
    role: str = Field(pattern="^(rollout|training)$")
    version: int | None = Field(default=None, ge=0)


class _Version(_Body):
    version: int = Field(ge=0)


class _Command(_Body):
    args: dict[str, Any] = Field(default_factory=dict)


class HostApi:
    """Answers calls about one cell. All need the daemon's token, that of the status too: it tells
    the engine's."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._daemon: Daemon | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/status", self._guard(self._status), methods=["GET"]),
            Route("/role", self._guard(self._role), methods=["POST"]),
            Route("/engine/version", self._guard(self._version), methods=["POST"]),
            Route("/replica/{command}", self._guard(self._command), methods=["POST"]),
        ]

    def serve_for(self, daemon: Daemon) -> None:
        """Take the token that calls must carry from ``daemon``."""
        self._daemon = daemon

    async def _status(self, request: Request) -> dict[str, Any]:
        cell = self._cell
        # Walking the processes costs more than all the rest, and the manager asks twice a second.
        engine_s = replica_s = None
        if "cpu" in request.query_params:
            engine_s, replica_s = await asyncio.gather(
                asyncio.to_thread(cpu_seconds, cell.engine.pid),
                asyncio.to_thread(cpu_seconds, cell.replica.pid),
            )
        assert self._daemon is not None
        return {
            "cell": cell.name,
            "role": str(cell.roles.role),
            "epoch": cell.fence.epoch,
            "detail": cell.roles.detail,
            "engine": {
                "url": cell.engine.url,
                "token": cell.engine.token,
                "version": cell.engine_version,
                "token_capacity": cell.engine.token_capacity,
                "pid": cell.engine.pid,
                "cpu_s": engine_s,
            },
            "replica": {
                "pid": cell.replica.pid,
                "cpu_s": replica_s,
                "version": cell.replica_version,
                "state": "awake" if cell.roles.role is HostRole.TRAINING else "asleep",
            },
            "incarnation": self._daemon.incarnation,
            "switches": [asdict(switch) for switch in cell.roles.switches],
            "mooncake": asdict(cell.moved),
            "pace": asdict(cell.pace),
        }

    async def _role(self, request: Request) -> dict[str, Any]:
        body = _Role.model_validate_json(await read_body(request, BODY_LIMIT_BYTES))
        await self._cell.change_role(body.epoch, HostRole(body.role), body.version)
        return await self._status(request)

    async def _version(self, request: Request) -> dict[str, Any]:
        body = _Version.model_validate_json(await read_body(request, BODY_LIMIT_BYTES))
        await self._cell.set_version(body.epoch, body.version)
        return await self._status(request)

    async def _command(self, request: Request) -> dict[str, Any]:
        body = _Command.model_validate_json(await read_body(request, BODY_LIMIT_BYTES))
        name = request.path_params["command"]
        return await self._cell.command(body.epoch, name, body.args)

    def _guard(
        self, answer: Callable[[Request], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that checks the token and turns errors into answers."""

        async def route(request: Request) -> Response:
            if self._daemon is None or not self._daemon.authorised(request):
                return JSONResponse({"error": "wrong token"}, 401)
            try:
                return Response(orjson.dumps(await answer(request)), media_type="application/json")
            except Exception as error:  # noqa: BLE001 - a border: the caller gets every reason
                return JSONResponse({"error": f"cell {self._cell.name}: {error}"}, _code(error))

        return route


def _code(error: Exception) -> int:
    match error:
        case StaleEpochError():
            return 409
        case BodyTooLargeError():
            return 413
        case ValidationError():
            return 400
        case UnknownCommandError():
            return 404
        case WrongRoleError() | VersionAbsentError() | ReplicaRefusedError():
            return 422
        case SwitchLateError() | EngineLateError() | ReplicaDeadlineError():
            return 504
        case EngineGoneError() | ReplicaDeadError():
            return 503
        case EngineError():
            return 502
        case _:
            return 500
