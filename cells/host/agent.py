"""``python -m cells.host.agent``: a cell's part on a machine that is not its leader's.

It does as its leader says, and knows no roles: a role change is a command to the leader, which the
ranks and the engine's processes here carry out or die of with the whole cell.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cells.body import BodyTooLargeError, read_body
from cells.daemon import Daemon
from cells.host.nodes import Part, agent_daemon
from cells.reason import CAN_NOT_START
from cells.replica.errors import ReplicaError
from cells.replica.meeting import use_interface_of
from cells.replica.node_ranks import NodeRanks
from cells.serving.process import EngineProcess
from cells.tls import Tls, TlsError
from configs.load import ConfigError
from storage.objects import StorageError
from storage.run import Run, open_run

log = logging.getLogger("cells.host.agent")

_BODY_LIMIT_BYTES = 1 << 20


class Agent:
    """The ranks and the engine processes of one machine, from ``start`` to ``end``.

    Args:
        node: number of the machine in its cell; the leader's is 0.
    """

    def __init__(self, run: Run, cell: str, node: int) -> None:
        self._run = run
        self._cell = next(one for one in run.config.cells.cells if one.name == cell)
        self._node = node
        self.address = self._cell.nodes[node - 1]
        self._name = agent_daemon(cell, node)
        self._ranks: NodeRanks | None = None
        self._engine: EngineProcess | None = None

    async def start(self, part: Part) -> None:
        """Start the part, in place of what an earlier leader has left."""
        await self.end()
        run, cells = self._run, self._run.config.cells
        self._ranks = NodeRanks.start(
            node=self._node,
            ranks=cells.layout.ranks // self._cell.machines,
            meeting=part.meeting,
            address=self.address,
            token=part.ranks_token,
            log=run.store.local_file(run.layout.log(f"{self._name}-ranks")),
            limit_s=cells.start_limit_s,
        )
        self._engine = EngineProcess(
            replace(part.engine, node=self._node, host=self.address),
            cpus=(),
            log=run.store.local_file(run.layout.log(f"{self._name}-engine")),
            tls=Tls(run.store, run.layout, run.config.tls),
        )

    def failure(self) -> str:
        """What of it has ended, and why; empty while all lives, or nothing was started."""
        for part in (self._ranks, self._engine):
            if part is not None and (why := part.failure()):
                return why
        return ""

    async def end(self) -> None:
        """End what was started."""
        ending = [part.close() for part in (self._ranks, self._engine) if part is not None]
        self._ranks = self._engine = None
        await asyncio.gather(*ending)


async def serve(run: Run, cell: str, node: int) -> None:
    """Be the agent until the lease ends or a stop is asked for."""
    agent = Agent(run, cell, node)
    name = agent_daemon(cell, node)

    async def status(_: Request) -> dict[str, Any]:
        return {"failure": agent.failure()}

    async def start(request: Request) -> dict[str, Any]:
        body = await read_body(request, _BODY_LIMIT_BYTES)
        await agent.start(Part.model_validate_json(body))
        return {}

    async def end(_: Request) -> dict[str, Any]:
        await agent.end()
        return {}

    def guarded(answer: Callable[[Request], Awaitable[dict[str, Any]]]) -> Any:
        async def route(request: Request) -> Response:
            if not daemon.authorised(request):
                return JSONResponse({"error": "wrong token"}, 401)
            try:
                return JSONResponse(await answer(request))
            except BodyTooLargeError as error:
                return JSONResponse({"error": f"{name}: {error}"}, 413)
            except ValidationError as error:
                return JSONResponse({"error": f"{name}: {error}"}, 400)
            except OSError as error:
                return JSONResponse({"error": f"{name}: {error}"}, 500)

        return route

    use_interface_of(agent.address)
    daemon = Daemon(
        name=name,
        kind="agent",
        lease_s=run.config.cells.lease_s,
        routes=[
            Route("/status", guarded(status), methods=["GET"]),
            Route("/start", guarded(start), methods=["POST"]),
            Route("/end", guarded(end), methods=["POST"]),
        ],
        close=agent.end,
        host=agent.address,
        tls=Tls(run.store, run.layout, run.config.tls),
    )
    await daemon.run(run.store, run.layout.host(name))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m cells.host.agent", description=__doc__)
    parser.add_argument("--root", required=True, help="storage root")
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--cell", required=True, help="name of the cell")
    parser.add_argument("--node", required=True, type=int, help="number of the machine, from 1")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        asyncio.run(serve(open_run(given.root, given.run), given.cell, given.node))
    except (ReplicaError, StorageError, ConfigError, TlsError) as error:
        log.error("%s %s%s", agent_daemon(given.cell, given.node), CAN_NOT_START, error)
        sys.exit(1)


if __name__ == "__main__":
    main()
