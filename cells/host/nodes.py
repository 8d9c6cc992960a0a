"""The further machines of a cell, as its leader sees them."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict

from cells.client import DaemonClient, DaemonError
from cells.serving.flags import EngineSettings
from configs.cells import CellConfig
from storage.run import Run

_POLL_S = 0.2
_WATCH_S = 2.0
_ASK_LIMIT_S = 5.0
_CHANGE_LIMIT_S = 30.0
"""Processes that an earlier leader has left are ended first."""
SILENCE_S = 30.0
"""How long an agent may not answer before its machine counts as lost, and the cell with it."""


def agent_daemon(cell: str, node: int) -> str:
    """Registered name of the agent of a cell's machine ``node``, 1 being the first after the
    leader's."""
    return f"agent-{cell}-{node}"


class NodesError(RuntimeError):
    """An agent did not come, or refused; the text names it."""


class Part(BaseModel):
    """What an agent starts.

    Args:
        meeting: HOST:PORT where the replica's ranks join their leader.
        ranks_token: secret that they join with.
        engine: as on the leader's machine.
    """

    model_config = ConfigDict(extra="forbid")
    meeting: str
    ranks_token: str
    engine: EngineSettings


class Nodes:
    """The agents of a cell: found, told what to start, watched, told to end it.

    Args:
        meeting: HOST:PORT on the leader's machine where the replica's ranks are to join.
    """

    def __init__(self, run: Run, cell: CellConfig, meeting: str) -> None:
        self._run = run
        self._names = [agent_daemon(cell.name, node) for node in range(1, cell.machines)]
        self._agents: list[DaemonClient] = []
        self._failure = ""
        self._watching: asyncio.Task[None] | None = None
        self.meeting = meeting
        self.ranks_token = secrets.token_urlsafe(24)

    async def start(self, engine: EngineSettings, limit_s: float) -> None:
        """Find the agents, which may be starting too, and have them start their parts.

        Raises:
            NodesError: one does not come within ``limit_s``, or refuses.
        """
        deadline = time.monotonic() + limit_s
        part = Part(meeting=self.meeting, ranks_token=self.ranks_token, engine=engine)
        body = part.model_dump(mode="json")
        for name in self._names:
            self._agents.append(await self._found(name, deadline))
        try:
            await asyncio.gather(*(_call(one, "POST", "/start", body) for one in self._agents))
        except DaemonError as error:
            raise NodesError(str(error)) from None
        self._watching = asyncio.create_task(self._watch())

    def failure(self) -> str:
        """What ended on which machine; empty while all live."""
        return self._failure

    async def close(self) -> None:
        """Have the agents end their parts; one that does not answer does so with its lease. Safe
        to call again."""
        if self._watching is not None:
            self._watching.cancel()
        agents, self._agents = self._agents, []
        await asyncio.gather(*(_end(one) for one in agents))

    async def _found(self, name: str, deadline: float) -> DaemonClient:
        while True:
            with suppress(DaemonError):
                client = await asyncio.to_thread(
                    DaemonClient.find, self._run.store, self._run.layout, name
                )
                if await asyncio.to_thread(client.alive):
                    return client
                client.close()
            if time.monotonic() > deadline:
                cell, _, node = name.removeprefix("agent-").rpartition("-")
                raise NodesError(
                    f"{name} did not come in time: run `gyre host {self._run.run_id} {cell} "
                    f"--node {node}` on its machine"
                )
            await asyncio.sleep(_POLL_S)

    async def _watch(self) -> None:
        heard = dict.fromkeys(self._names, time.monotonic())
        while not self._failure:
            await asyncio.sleep(_WATCH_S)
            for agent in self._agents:
                try:
                    status = await _call(agent, "GET", "/status", None)
                    heard[agent.name] = time.monotonic()
                    why = str(status["failure"])
                except DaemonError as error:
                    silent = time.monotonic() - heard[agent.name] > SILENCE_S
                    why = f"does not answer: {error}" if silent else ""
                if why:
                    self._failure = f"{agent.name}: {why}"


async def _call(
    agent: DaemonClient, method: str, path: str, body: dict[str, Any] | None
) -> dict[str, Any]:
    limit_s = _ASK_LIMIT_S if method == "GET" else _CHANGE_LIMIT_S
    return await asyncio.to_thread(agent.call, method, path, body, limit_s=limit_s)


async def _end(agent: DaemonClient) -> None:
    with suppress(DaemonError):
        await _call(agent, "POST", "/end", None)
    agent.close()
