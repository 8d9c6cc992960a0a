"""What Prefect costs an execution, in a burst of a step: JSON on standard output.

    python -m tests.benchmarks.orchestration --executions 500
    python -m tests.benchmarks.orchestration --executions 5000 --scaled

Starts a server as Gyre starts it, on SQLite or (``--scaled``) on a PostgreSQL and a Redis that it
starts too, runs the task runs of a step (a rollout, a score and samples for each group, and two
long ones) with nothing in them, and waits until all are recorded. All times but ``wall_s`` are
processor time.

``dropped_events`` counts what the server's log says it has lost, and task runs whose end it does
not know in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cells.ports import free_port
from configs.cells import PrefectConfig
from flows.server import DATABASE_URL, REDIS_URL
from tests.flows.databases import Service, postgres, redis

RECORD_LIMIT_S = 1800.0
_POLL_S = 2.0
_LOST = (b"dropping", b"Dropping")


@dataclass(frozen=True)
class Server:
    """What is measured."""

    pid: int
    home: Path
    database: Service | None
    """PostgreSQL; None is a file of SQLite in ``home``."""
    broker: Service | None

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def databases_cpu_s(self) -> float:
        return sum(one.cpu_s() for one in (self.database, self.broker) if one is not None)

    def megabytes(self) -> float:
        if self.database is not None:
            return asyncio.run(_size_of(self.database.url)) / 1e6
        return sum(file.stat().st_size for file in self.home.glob("prefect.db*")) / 1e6

    def losses(self) -> int:
        lines = (self.home / "server.log").read_bytes().splitlines()
        return sum(any(mark in line for mark in _LOST) for line in lines)


async def _size_of(url: str) -> int:
    import asyncpg

    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        return int(await connection.fetchval("SELECT pg_database_size(current_database())"))
    finally:
        await connection.close()


@contextmanager
def server(scaled: bool) -> Iterator[Server]:
    """A new server for as long as the block lasts."""
    from flows.server import orchestration

    os.environ.pop("PREFECT_API_URL", None)
    with ExitStack() as stack:
        database = broker = None
        if scaled:
            database, broker = stack.enter_context(postgres()), stack.enter_context(redis())
            os.environ |= {DATABASE_URL: database.url, REDIS_URL: broker.url}
        folder = tempfile.TemporaryDirectory(prefix="gyre-orchestration-")
        home = Path(stack.enter_context(folder))
        config = PrefectConfig(port=free_port(), start_limit_s=900)
        started = stack.enter_context(orchestration(config, home, lambda _: None)).started
        yield Server(started[0].pid, home, database, broker)


def measure(executions: int, group: int, measured: Server) -> dict[str, Any]:
    """Run a step of no work and count processor time on both sides."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.futures import wait
    from prefect.states import State

    from flows.rollouts import runner_for

    groups = -(-executions // group)

    @task(task_run_name="{kind} {query}", cache_policy=NO_CACHE)
    def stage(kind: str, query: str) -> None:
        """Nothing."""

    @flow(name="burst", task_runner=runner_for(groups))
    def burst() -> str:
        from prefect.runtime import flow_run

        long = [stage.submit(kind, "") for kind in ("manage_cells", "train_stream")]
        names = [f"s00000-q{number:04d}" for number in range(groups)]
        rollouts = [stage.submit("rollout", name) for name in names]
        wait(rollouts)
        scores = [stage.submit("score", name) for name in names]
        samples = [stage.submit("samples", name) for name in names]
        wait([*long, *scores, *samples])
        return str(flow_run.id)

    client_before, server_before = time.process_time(), measured.cpu_s()
    databases_before = measured.databases_cpu_s()
    size_before, began = measured.megabytes(), time.monotonic()
    result: str | State[Any] = burst()
    client_s = time.process_time() - client_before
    expected = 3 * groups + 2
    recorded = _recorded(str(result), expected)

    def each(seconds: float) -> float:
        return round(1e3 * seconds / executions, 2)

    return {
        "executions": executions,
        "group_size": group,
        "database": "SQLite" if measured.database is None else "PostgreSQL, Redis",
        "task_runs": expected,
        "task_runs_recorded": recorded,
        "client_cpu_ms_per_execution": each(client_s),
        "server_cpu_ms_per_execution": each(measured.cpu_s() - server_before),
        "databases_cpu_ms_per_execution": each(measured.databases_cpu_s() - databases_before),
        "mb_per_step": round(measured.megabytes() - size_before, 2),
        "dropped_events": measured.losses() + expected - recorded,
        "wall_s": round(time.monotonic() - began, 1),
    }


def _recorded(flow_run: str, expected: int) -> int:
    """How many task runs the server knows to be completed in the end."""
    from prefect.client.orchestration import get_client

    which = {
        "flow_runs": {"id": {"any_": [flow_run]}},
        "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
    }
    deadline = time.monotonic() + RECORD_LIMIT_S
    with get_client(sync_client=True) as client:
        while True:
            count = int(client.request("POST", "/task_runs/count", json=which).json())
            if count >= expected or time.monotonic() > deadline:
                return count
            time.sleep(_POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--executions", type=int, default=500)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--scaled", action="store_true", help="on PostgreSQL and Redis")
    options = parser.parse_args()
    with server(options.scaled) as measured:
        print(json.dumps(measure(options.executions, options.group_size, measured)))


if __name__ == "__main__":
    main()
