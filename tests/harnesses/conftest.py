"""Stages for real clients. The clients are installed on first use and shared by all tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cells.gateway.codec import Codec
from cells.gateway.server import Gateway
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store
from tasks.rollout.door import make_client
from tasks.rollout.execution import Surroundings
from tasks.rollout.harnesses.launch import make_harness
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sessions import GatewaySessions
from tests.cells.gateway.conftest import LIMIT_S, Bench, registered
from tests.engines.scripted import ScriptedEngine
from tests.harnesses.stage import Play, Stage, Tasks, tokenizer

CONTEXT = 131_072
RENDERER = "tests.harnesses.renderer:KeepingRenderer"
MakeStage = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def make_stage(tmp_path: Path) -> MakeStage:
    """``async with make_stage(play, harness={...}, engines=2) as stage``."""

    @asynccontextmanager
    async def stage(
        play: Play,
        *,
        harness: dict[str, Any],
        engines: int = 1,
        context: int = CONTEXT,
        codec: Codec | None = None,
    ) -> AsyncIterator[Stage]:
        budget = {"context_budget": 100_000, "max_tokens": 8192, "turns": 40, "tool_timeout_s": 600}
        config = RunConfig.model_validate(
            {
                "model": {"context": context},
                "cells": {"kv_tokens": context, "lease_s": 3600},  # nobody renews it
                "harness": {**budget, **harness},
                "rollout": {"limit_s": 3000, "retries": 0},
            }
        )
        store, layout = Store(tmp_path / "root"), RunLayout("r1")
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        tasks = Tasks()
        limit_s = config.gateway.call_limit_s
        around = Surroundings(
            store=store,
            layout=layout,
            config=config.rollout,
            source=tasks,  # type: ignore[arg-type]
            sessions=GatewaySessions(store, layout, patience_s=20),
            doors=make_client(),
            sandbox=make_sandbox(config.rollout.sandbox),
            harness=await asyncio.to_thread(
                make_harness, config.harness, limit_s, tmp_path, context
            ),
            scratch=scratch,
        )
        codec = codec or Codec(tokenizer(), RENDERER)
        gateway = Gateway(store, layout, config, codec)
        running = asyncio.create_task(gateway.run())
        found = await registered(store, layout, running)
        bench = Bench(found.token, found.url, store, layout)
        played = [ScriptedEngine(play, incremental=True) for _ in range(engines)]
        try:
            for number, engine in enumerate(played):
                await engine.start()
                await bench.cell(f"cell-{number}", engine, capacity=1000)
            yield Stage(bench, played, play, tasks, around, config, tmp_path)
        finally:
            await around.sessions.close_client()
            await around.doors.close()
            for engine in played:
                await engine.stop()
            await bench.stop()
            await bench.http.aclose()
            await asyncio.wait_for(running, LIMIT_S)

    return stage
