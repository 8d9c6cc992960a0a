"""What Prefect costs an execution, in a burst of a step: JSON on standard output.

    python -m tests.benchmarks.orchestration --executions 500

Starts a server on SQLite as Gyre starts it, runs the task runs of a step (a rollout, a score and
samples for each group, and two long ones) with nothing in them, and waits until all are recorded.
With PREFECT_API_URL it measures that server; ``--pid`` names its processes on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cells.serving.process import free_port
from configs.cells import PrefectConfig

RECORD_LIMIT_S = 900.0
_POLL_S = 2.0
_LOST = (b"dropping", b"Dropping")


@dataclass(frozen=True)
class Server:
    """What is measured, and its processes as far as they are known."""

    processes: tuple[int, ...]
    home: Path | None
    """Where a server that was started here keeps its data."""

    def cpu_s(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self.processes]
        return sum(one.user + one.system for one in times)

    def megabytes(self) -> float:
        files = [] if self.home is None else list(self.home.glob("prefect.db*"))
        return sum(file.stat().st_size for file in files) / 1e6

    def dropped(self) -> int | None:
        if self.home is None:
            return None
        lines = (self.home / "server.log").read_bytes().splitlines()
        return sum(any(mark in line for mark in _LOST) for line in lines)


@contextmanager
def server(pids: list[int]) -> Iterator[Server]:
    """The server of PREFECT_API_URL, or a new one for as long as the block lasts."""
    from flows.server import orchestration

    if os.environ.get("PREFECT_API_URL"):
        yield Server(tuple(pids), None)
        return
    with tempfile.TemporaryDirectory(prefix="gyre-orchestration-") as name:
        home = Path(name)
        config = PrefectConfig(port=free_port(), start_limit_s=900)
        with orchestration(config, home, lambda _: None) as started:
            yield Server(tuple(one.pid for one in started.started), home)


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
    size_before, began = measured.megabytes(), time.monotonic()
    result: str | State[Any] = burst()
    client_s = time.process_time() - client_before
    expected = 3 * groups + 2
    recorded = _recorded(str(result), expected)
    return {
        "executions": executions,
        "group_size": group,
        "task_runs": expected,
        "task_runs_recorded": recorded,
        "client_cpu_ms_per_execution": round(1e3 * client_s / executions, 2),
        "server_cpu_ms_per_execution": round(
            1e3 * (measured.cpu_s() - server_before) / executions, 2
        )
        if measured.processes
        else None,
        "mb_per_step": round(measured.megabytes() - size_before, 2) if measured.home else None,
        "dropped_events": measured.dropped(),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _recorded(flow_run: str, expected: int) -> int:
    """How many task runs the server knows in the end, all of them final."""
    from uuid import UUID

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterId,
        TaskRunFilter,
        TaskRunFilterState,
        TaskRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType

    which = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run)]))
    done = TaskRunFilter(
        state=TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.COMPLETED]))
    )
    deadline = time.monotonic() + RECORD_LIMIT_S
    with get_client(sync_client=True) as client:
        while True:
            answer = client.request(
                "POST",
                "/task_runs/count",
                json={
                    "flow_runs": which.model_dump(mode="json"),
                    "task_runs": done.model_dump(mode="json"),
                },
            )
            count = int(answer.json())
            if count >= expected or time.monotonic() > deadline:
                return count
            time.sleep(_POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--executions", type=int, default=500)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--pid", type=int, action="append", default=[])
    options = parser.parse_args()
    with server(options.pid) as measured:
        print(json.dumps(measure(options.executions, options.group_size, measured)))


if __name__ == "__main__":
    main()
