"""`gyre replay` of updates that a core and a satellite have trained together: the same bits."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cells.host.replica import ReplicaProcess, replica_settings
from configs.load import dump_config
from flows.replay import digest_of, replay, trained_updates
from storage.copies import local_copy
from storage.objects import Store
from storage.records import StepPlan
from storage.run import Run, open_run
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.stream import train_stream
from tasks.warm_start.policies import first_policy
from tests.flows.conftest import FinishedRun

pytestmark = [pytest.mark.real, pytest.mark.timeout(1000)]

LIMIT_S = 300.0
TOKENS = 16
"""Of a micro-step: so few that each sample is one."""


class Port:
    """A replica of this process's own; the core waits until the satellite has trained."""

    def __init__(self, replica: ReplicaProcess, name: str, first: threading.Event) -> None:
        self._replica = replica
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.core = name == "a"
        self._first = first

    def call(self, command: str, args: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if self.core and command == "micro_step":
            assert self._first.wait(LIMIT_S), "the satellite did not train"
        asked = asyncio.run_coroutine_threadsafe(
            self._replica.call(command, args, LIMIT_S), self._loop
        )
        answer = asked.result(LIMIT_S)
        if command == "micro_step":
            self._first.set()
        return answer


def untrained(finished: FinishedRun, root: Path) -> Run:
    """A copy of a run of which nothing was trained yet, with small micro-steps."""
    shutil.copytree(finished.run.store.url, root, ignore=shutil.ignore_patterns("prefect"))
    old, store = finished.run, Store(root)
    training = old.config.training.model_copy(update={"micro_step_tokens": TOKENS, "steps": 1})
    config = old.config.model_copy(update={"training": training})
    store.write(old.layout.config, dump_config(config).encode())
    for name in ("ledger", "updates", "done.json"):
        for path in root.rglob(f"steps/*/{name}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(root / old.layout.prefix / "checkpoints")
    return open_run(str(root), old.run_id)


async def train(run: Run, folder: Path) -> None:
    """One step on two replicas; the core's weights go to ``folder``."""
    key = first_policy(run)
    assert key is not None
    first = threading.Event()
    replicas = {
        cell.name: await ReplicaProcess.start(
            replica_settings(run.config, root=run.store.url, cell=cell),
            policy=local_copy(run.store, key),
            version=0,
            cpus=(),
            log=folder.parent / f"{cell.name}.log",
            limit_s=LIMIT_S,
        )
        for cell in run.config.cells.cells
    }
    try:
        ports = [Port(replica, name, first) for name, replica in replicas.items()]
        feed = GroupFeed()
        queries = run.store.read_record(run.layout.step_plan(0), StepPlan).queries
        for query in queries:
            feed.put(query.query_id)
        feed.close()
        with ThreadPoolExecutor(1) as threads:
            await asyncio.get_running_loop().run_in_executor(
                threads,
                lambda: train_stream(
                    store=run.store,
                    layout=run.layout,
                    config=run.config,
                    step=0,
                    groups=len(queries),
                    feed=feed,
                    members=lambda: ports,
                    spent=lambda: Spent(0.0, 0.0),
                ),
            )
        await replicas["a"].call("export", {"path": str(folder)}, LIMIT_S)
    finally:
        await asyncio.gather(*(replica.close() for replica in replicas.values()))


def test_what_a_satellite_has_summed_is_summed_on_its_own_again(
    smoke_run: FinishedRun, tmp_path: Path
) -> None:
    run = untrained(smoke_run, tmp_path / "root")
    asyncio.run(train(run, tmp_path / "weights"))
    updates = trained_updates(run)
    shares = [share for update in updates for share in update.shares]
    assert any(share.satellite for share in shares)
    assert any(not share.satellite for share in shares)
    again = replay(run, end=updates[-1].version, say=lambda _: None)
    assert again.digest == digest_of(tmp_path / "weights"), "bit for bit"
