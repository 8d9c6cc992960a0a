"""The execution host: a leased daemon that owns the harness processes of a run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cells.daemon import Daemon
from storage.objects import StorageError
from storage.records import ExecutionSpec, RecordError, decode
from storage.run import Run, open_run
from tasks.problems.source import make_source
from tasks.rollout import strays
from tasks.rollout.door import make_client
from tasks.rollout.execution import Surroundings
from tasks.rollout.executions import Executions, State
from tasks.rollout.harnesses.launch import make_harness
from tasks.rollout.sandboxes import cgroup
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sandboxes.sandbox import python_executable
from tasks.rollout.sessions import GatewaySessions
from tasks.rollout.snapshot import remove_tree

_LONGEST_POLL_S = 60.0
_BODY_BYTES = 1 << 20


Handler = Callable[[Request], Awaitable[Response]]


class _Asked(BaseModel):
    """Executions of which somebody waits for the first to end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: tuple[str, ...]
    wait_s: float = Field(ge=0)


class HostRoutes:
    """The HTTP side of an execution host."""

    def __init__(self, executions: Executions) -> None:
        self._executions = executions
        self.daemon: Daemon | None = None

    def routes(self) -> list[Route]:
        path = "/executions/{execution_id}"
        return [
            Route(path, self._guard(self._put), methods=["PUT"]),
            Route(path, self._guard(self._get), methods=["GET"]),
            Route(path, self._guard(self._delete), methods=["DELETE"]),
            Route(f"{path}/finish", self._guard(self._finish), methods=["POST"]),
            Route("/ended", self._guard(self._ended), methods=["POST"]),
            Route("/state", self._guard(self._state), methods=["GET"]),
        ]

    def _guard(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            assert self.daemon is not None
            if not self.daemon.authorised(request):
                return _error(401, "wrong token")
            try:
                return await handler(request)
            except (ValueError, RecordError) as error:
                return _error(400, f"{request.method} {request.url.path}: {error}")
            except StorageError as error:
                return _error(503, f"{request.method} {request.url.path}: {error}")

        return guarded

    async def _put(self, request: Request) -> Response:
        size = int(request.headers.get("content-length", "-1"))
        if not 0 <= size <= _BODY_BYTES:
            raise ValueError(f"the body must be a specification of at most {_BODY_BYTES} bytes")
        spec = _spec(await request.body())
        if spec.execution_id != request.path_params["execution_id"]:
            raise ValueError(f"the body is of {spec.execution_id}")
        return JSONResponse({"state": (await self._executions.submit(spec)).value}, 202)

    async def _get(self, request: Request) -> Response:
        wait_s = float(request.query_params.get("wait_s", "0"))
        entry = await self._executions.find(request.path_params["execution_id"])
        if entry is None:
            return JSONResponse({"state": State.UNKNOWN.value})
        with suppress(TimeoutError):
            await asyncio.wait_for(entry.ended.wait(), min(max(wait_s, 0.0), _LONGEST_POLL_S))
        return JSONResponse(entry.view())

    async def _delete(self, request: Request) -> Response:
        state = await self._executions.drop(request.path_params["execution_id"])
        return JSONResponse({"state": state.value})

    async def _finish(self, request: Request) -> Response:
        state = await self._executions.finish(request.path_params["execution_id"])
        return JSONResponse({"state": state.value})

    async def _ended(self, request: Request) -> Response:
        size = int(request.headers.get("content-length", "-1"))
        if not 0 <= size <= _BODY_BYTES:
            raise ValueError(f"the body must name executions in at most {_BODY_BYTES} bytes")
        asked = _Asked.model_validate_json(await request.body())
        states = await self._executions.any_ended(asked.names, min(asked.wait_s, _LONGEST_POLL_S))
        return JSONResponse({"states": {name: state.value for name, state in states.items()}})

    async def _state(self, request: Request) -> Response:
        return JSONResponse(self._executions.count())


def _spec(body: bytes) -> ExecutionSpec:
    """A specification as a record, or as its plain fields."""
    fields = orjson.loads(body)
    if isinstance(fields, dict) and "record" not in fields:
        return ExecutionSpec.model_validate(fields)
    return decode(body, ExecutionSpec, where="specification")


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


async def serve(run: Run, name: str, scratch: Path) -> None:
    """Run the daemon until its lease ends or it is stopped."""
    config = run.config
    around = Surroundings(
        doors=make_client(),
        store=run.store,
        layout=run.layout,
        config=config.rollout,
        source=make_source(config.problems),
        sessions=GatewaySessions(run.store, run.layout),
        sandbox=make_sandbox(config.rollout.sandbox, config.rollout.image),
        harness=make_harness(
            config.harness, config.gateway.call_limit_s, scratch, config.model.context
        ),
        scratch=scratch,
    )
    executions = Executions(run, around)
    routes = HostRoutes(executions)
    routes.daemon = Daemon(
        name=name,
        kind="execution-host",
        lease_s=config.cells.lease_s,
        routes=routes.routes(),
        close=executions.close,
    )
    await routes.daemon.run(run.store, run.layout.host(name))


def _start_watcher(scratch: Path) -> subprocess.Popen[bytes]:
    """The process that cleans up when this one is killed: its input ends with us."""
    return subprocess.Popen(
        [python_executable(), "-I", "-S", strays.__file__, str(scratch), *cgroup.base_folders()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        start_new_session=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="tasks.rollout.host", description=__doc__)
    parser.add_argument("--root", required=True, help="storage root")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--name", default="executions", help="registered name of this host")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run = open_run(arguments.root, arguments.run)
    scratch = Path(tempfile.mkdtemp(prefix="gyre-executions-")).resolve()
    watcher = _start_watcher(scratch)
    try:
        asyncio.run(serve(run, arguments.name, scratch))
    finally:
        remove_tree(scratch)
        cgroup.remove_base()
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait(timeout=30)


if __name__ == "__main__":
    main()
