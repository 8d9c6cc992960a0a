"""Replicas of two ranks as the product runs them: one client, one answer, one death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cells.replica.client import ReplicaClient, ReplicaDeadError, ReplicaRefusedError
from cells.replica.settings import ReplicaSettings
from cells.replica.team import merged
from configs.layout import LayoutConfig
from storage.objects import Store
from tests.cells.replica.conftest import MakeFolder, seal_group

START_LIMIT_S = 250
TENSOR = LayoutConfig(tensor=2)


@pytest.fixture
async def pair(
    tmp_path: Path, model_folder: MakeFolder
) -> AsyncIterator[tuple[ReplicaClient, ReplicaClient]]:
    """A core and a satellite of two tensor ranks each."""
    store = Store(tmp_path / "store")
    for seed in range(2):
        seal_group(store, f"g{seed}", seed)

    async def start(core: bool) -> ReplicaClient:
        settings = ReplicaSettings(
            root=str(tmp_path / "store"),
            core=core,
            layout=TENSOR,
            objective="tests.cells.replica.losses:SequenceRatio",
        )
        log = tmp_path / f"core-{core}.log"
        client = await ReplicaClient.start(settings, log=log, limit_s=START_LIMIT_S)
        await client.call("load", {"path": str(model_folder("qwen3")), "version": 0})
        return client

    core = await start(True)
    try:
        satellite = await start(False)
        try:
            yield core, satellite
        finally:
            await satellite.close()
    finally:
        await core.close()


async def work(client: ReplicaClient, name: str, group: str) -> dict[str, Any]:
    samples = [{"group_key": group, "index": index} for index in range(3)]
    args = {"step": 0, "update": 0, "micro_step": name, "samples": samples}
    return await client.call("micro_step", args)


async def step(client: ReplicaClient) -> dict[str, Any]:
    args = {"step": 0, "update": 0, "executions": 5, "learning_rate": 1e-2}
    return await client.call("step", args)


@pytest.mark.real
async def test_ranks_share_an_update_with_a_satellite_and_die_together(
    pair: tuple[ReplicaClient, ReplicaClient], model_folder: MakeFolder, tmp_path: Path
) -> None:
    core, satellite = pair
    alone = [await work(core, name, group) for name, group in (("a", "g0"), ("b", "g1"))]
    assert [answer["samples"] for answer in alone] == [3, 3]
    expected = await step(core)
    await core.call("export", {"path": str(tmp_path / "one")})

    await core.call("load", {"path": str(model_folder("qwen3")), "version": 0})
    published = await core.call("publish")
    assert len(published["descriptor"]["ranks"]) == 2
    pulled = await satellite.call("pull", published)
    assert pulled["bytes"] == published["descriptor"]["nbytes"]
    await work(core, "a", "g0")
    shared = await work(satellite, "b", "g1")
    stats = {name: value for name, value in shared["stats"].items() if name != "seconds"}
    assert stats == pytest.approx(alone[1]["stats"], rel=1e-6)
    frozen = await satellite.call("freeze", {"update": 0})

    wrong = {**frozen["descriptor"], "ranks": [dict(one) for one in frozen["descriptor"]["ranks"]]}
    wrong["ranks"][1]["checksum"] ^= 1
    with pytest.raises(ReplicaRefusedError, match="rank 1 of the replica"):
        await core.call("reduce", {"update": 0, **frozen, "descriptor": wrong}, 30)
    assert (await core.call("status"))["micro_steps"] == ["a"], "no rank has added anything"

    await core.call("reduce", {"update": 0, **frozen}, 30)
    assert await step(core) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ReplicaRefusedError, match="unknown command"):
        await core.call("fly")
    assert (await core.call("status"))["version"] == 1, "all refused alike, and live on"

    [other] = [
        child.pid
        for child in psutil.Process(core.pid).children()
        if "cells.replica.worker" in child.cmdline()
    ]
    os.kill(other, signal.SIGKILL)
    with pytest.raises(ReplicaDeadError):
        for _ in range(10_000):
            with suppress(ReplicaRefusedError):  # it may come to say that it is damaged
                await core.call("status")
            await asyncio.sleep(0)


def test_answers_of_ranks_become_one() -> None:
    """Two data ranks of two stages each; only the last stage knows the statistics."""
    settings = ReplicaSettings(
        root="x", core=True, objective="a:B", layout=LayoutConfig(data=2, pipeline=2)
    )

    def answer(samples: int, stats: dict[str, float]) -> dict[str, Any]:
        return {
            "micro_step": "m",
            "tokens": 10 * samples,
            "target_tokens": samples,
            "samples": samples,
            "seconds": float(samples),
            "stats": stats,
        }

    told = [answer(1, {}), answer(2, {}), answer(1, {"a_sum": 1.0, "g_max": 0.5, "x": 1.0})]
    told.append(answer(2, {"a_sum": 2.0, "g_max": 0.25, "y": -3.0}))
    assert merged("micro_step", told, settings) == {
        "micro_step": "m",
        "tokens": 30,
        "target_tokens": 3,
        "samples": 3,
        "seconds": 2.0,
        "stats": {"a_sum": 3.0, "g_max": 0.5, "x": 1.0, "y": -3.0},
    }
