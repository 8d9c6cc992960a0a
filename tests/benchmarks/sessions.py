"""Many agents at once, for long: 2,000 sessions for ten minutes at one gateway process.

Each session has its own connection, thinks between its calls, asks some times in one conversation
that grows by 600 tokens a call, closes its execution and begins another one. Their first
conversations are of random length, so that after as many pauses as many end as begin. The engine is
a scripted one; all is recorded as in a run. Every answer is read, and when an execution is closed,
the gateway has to have recorded as many calls as were made.

Prints one JSON object. Run it with ``python -m tests.benchmarks.sessions``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import uvloop

from cells.daemon import Registration
from cells.process import end_group, spawn
from configs.load import dump_config
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store
from tests.benchmarks.gateway import Conversation, Texts, corpus, make_tokenizer

START_LIMIT_S = 180.0
CALL_LIMIT_S = 120.0
CONNECT_AT_ONCE = 64
SETTLED = 1 / 3
"""Share of the time after which as many conversations end as begin."""


@dataclass(frozen=True)
class Load:
    """What is asked of the gateway.

    Args:
        think_s: mean of a session's pauses; each is between half of it and one and a half.
        turns: calls of a conversation; ``turns * think_s`` is at most a third of ``seconds`` where
            memory is to be looked at.
    """

    sessions: int
    seconds: float
    think_s: float
    turns: int


@dataclass
class Seen:
    """What became of it."""

    call_s: list[float] = field(default_factory=list)
    closed: int = 0
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the beginning, and resident bytes of the gateway."""
    at_once: int = 0
    """Executions open at the gateway, at the least, while all sessions ran."""

    def slope(self) -> tuple[float, float]:
        """Mean bytes when settled, and bytes a second by which they grow (least squares)."""
        ends = self.memory[-1][0]
        settled = [(at, size) for at, size in self.memory if at >= SETTLED * ends]
        at, size = np.array(settled, dtype=float).T
        return float(size.mean()), float(np.polyfit(at, size, 1)[0])


class Agents:
    """The sessions of a load, at a gateway that runs."""

    def __init__(self, gateway: Registration, texts: Texts, load: Load) -> None:
        self._gateway = gateway
        self._admin = {"authorization": f"Bearer {gateway.token}"}
        self._texts = texts
        self._load = load
        self._opened = 0
        self._connecting = asyncio.Semaphore(CONNECT_AT_ONCE)
        self._random = random.Random(0)
        self.seen = Seen()

    async def run(self, engine: str) -> Seen:
        """Ask until the time is over, and let every session end its conversation's last call."""
        async with _http() as http:
            cell = {"epoch": 1, "url": engine, "capacity": 1_000_000, "version": 0}
            await self._ask(http, "PUT", "/admin/cells/a", {**cell, "state": "serving"})
            keeping = asyncio.create_task(self._keep_alive(http))
            start = time.monotonic()
            watching = asyncio.create_task(self._watch(http, start))
            until = start + self._load.seconds
            await asyncio.gather(*(self._session(until) for _ in range(self._load.sessions)))
            for task in (keeping, watching):
                task.cancel()
        return self.seen

    async def _session(self, until: float) -> None:
        turns = self._random.randint(1, self._load.turns)
        async with _http() as http:
            await self._think()
            while time.monotonic() < until:
                try:
                    await self._conversation(http, turns, until)
                except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
                    self.seen.errors.append(f"{type(error).__name__}: {error}"[:500])
                turns = self._load.turns

    async def _conversation(self, http: aiohttp.ClientSession, turns: int, until: float) -> None:
        self._opened += 1
        path = f"/admin/executions/e{self._opened}"
        async with self._connecting:
            opening = {"temperature": 1.0, "policy_version": 0}
            opened = await self._ask(http, "PUT", path, opening)
        url = f"{opened['base_url']}/chat/completions"
        conversation = Conversation(http, self._texts, url, opened["api_key"])
        while conversation.turns < turns and time.monotonic() < until:
            self.seen.call_s.append(await conversation.turn())
            await self._think()
        closed = await self._ask(http, "DELETE", path)
        assert closed["calls"] == conversation.turns, f"{path}: {closed} of {conversation.turns}"
        self.seen.closed += 1

    async def _think(self) -> None:
        await asyncio.sleep(self._load.think_s * self._random.uniform(0.5, 1.5))

    async def _ask(
        self, http: aiohttp.ClientSession, method: str, path: str, body: Any = None
    ) -> dict[str, Any]:
        url = f"{self._gateway.url}{path}"
        async with http.request(method, url, json=body, headers=self._admin) as answer:
            assert answer.status == 200, f"{method} {path}: {await answer.text()}"
            return dict(await answer.json())

    async def _keep_alive(self, http: aiohttp.ClientSession) -> None:
        while True:
            await self._ask(http, "POST", "/lease")
            await asyncio.sleep(5)

    async def _watch(self, http: aiohttp.ClientSession, start: float) -> None:
        """Sample the gateway's memory, and how many executions are open between a first and a last
        thought."""
        process = psutil.Process(self._gateway.pid)
        load, every_s = self._load, min(5.0, self._load.seconds / 30)
        while True:
            await asyncio.sleep(every_s)
            at = time.monotonic() - start
            self.seen.memory.append((at, process.memory_info().rss))
            if 3 * load.think_s < at < load.seconds:
                state = await self._ask(http, "GET", "/admin/state")
                found = int(state["open"])
                self.seen.at_once = min(self.seen.at_once or found, found)


@asynccontextmanager
async def _http() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=CALL_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=4, keepalive_timeout=110)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        yield http


def measure(load: Load, folder: Path) -> dict[str, Any]:
    """Start an engine and a gateway, load them, and say what was seen.

    Raises:
        AssertionError: one of them did not start.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    text = corpus()
    tokenizer = make_tokenizer(text)
    tokenizer.save_pretrained(folder / "policy")
    texts = Texts(tokenizer, text)
    store, layout = Store(folder / "root"), RunLayout("r1")
    config = RunConfig.model_validate(
        {
            "model": {"context": 32_768, "renderer": "qwen3"},
            "cells": {"cells": [{"name": "a", "core": True}], "kv_tokens": 32_768},
        }
    )
    store.write(layout.config, dump_config(config).encode())
    engine_log = folder / "engine.log"
    reply = ",".join(map(str, texts.reply))
    processes = [_start(["-m", "tests.engines.scripted", "--reply", reply], engine_log)]
    try:
        argv = ["-m", "cells.gateway.server", "--root", store.url, "--run", "r1"]
        gateway_log = folder / "gateway.log"
        processes.append(_start([*argv, "--policy", str(folder / "policy")], gateway_log))
        deadline = time.monotonic() + START_LIMIT_S
        while not (store.exists(layout.host("gateway")) and engine_log.read_text().endswith("\n")):
            assert time.monotonic() < deadline, gateway_log.read_text() + engine_log.read_text()
            time.sleep(0.1)
        gateway = store.read_record(layout.host("gateway"), Registration)
        process = psutil.Process(gateway.pid)
        agents = Agents(gateway, texts, load)
        spent = process.cpu_times()
        seen = uvloop.run(agents.run(engine_log.read_text().strip()))
        now = process.cpu_times()
        cpu_s = now.user + now.system - spent.user - spent.system
        warnings = [line for line in gateway_log.read_text().splitlines() if " ERROR " in line]
    finally:
        for child in processes:
            end_group(child, grace_s=5)
    return figures(load, seen, cpu_s) | {"gateway_errors": warnings[:5]}


def _start(argv: list[str], log: Path) -> int:
    return spawn([sys.executable, *argv], env=dict(os.environ), log=log).pid


def figures(load: Load, seen: Seen, cpu_s: float) -> dict[str, Any]:
    took = sorted(seen.call_s)
    mean, slope = seen.slope()
    settled_s = seen.memory[-1][0] * (1 - SETTLED)
    third = len(seen.memory) // 3
    return {
        "sessions": load.sessions,
        "seconds": load.seconds,
        "think_s": load.think_s,
        "turns": load.turns,
        "calls": len(took),
        "calls_per_s": len(took) / load.seconds,
        "executions_closed": seen.closed,
        "open_at_once": seen.at_once,
        "errors": len(seen.errors),
        "first_errors": seen.errors[:5],
        **{f"p{part}_ms": took[len(took) * part // 100] * 1e3 for part in (50, 90, 99)},
        "longest_ms": took[-1] * 1e3,
        "gateway_cpu_ms": cpu_s / len(took) * 1e3,
        "memory_mb": [round(size / 1e6, 1) for _, size in seen.memory[:: max(1, third // 10)]],
        "settled_mb": mean / 1e6,
        "growth_mb_per_minute": slope * 60 / 1e6,
        "growth_of_settled": slope * settled_s / mean,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--think", type=float, default=20.0, help="mean seconds between calls")
    parser.add_argument("--turns", type=int, default=10, help="calls of a conversation")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    load = Load(arguments.sessions, arguments.seconds, arguments.think, arguments.turns)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(load, Path(folder))))


if __name__ == "__main__":
    main()
