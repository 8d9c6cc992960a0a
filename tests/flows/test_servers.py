"""Prefect's server in two parts on PostgreSQL and Redis, by the lines that the documents give."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from cells.ports import free_port
from cells.process import end_group
from flows.server import healthy
from tests.flows.databases import postgres, redis

ROOT = Path(__file__).parents[2]
LIMIT_S = 400.0
_POLL_S = 1.0
_RUN_A_FLOW = """
from prefect import flow, task
from prefect.runtime import flow_run
@task
def nothing() -> None: ...
@flow
def whole() -> str:
    nothing.submit().result()
    return str(flow_run.id)
print(whole())
"""


def documented() -> tuple[dict[str, str], list[list[str]]]:
    """What the block of several servers exports, and the commands below it."""
    text = (ROOT / "docs" / "cluster.md").read_text("utf-8")
    block = text.partition("Several servers behind one address")[2].split("```")[1]
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", block, re.MULTILINE))
    lines = [line for line in block.splitlines() if line.startswith("prefect ")]
    return exported, [part.split() for line in lines for part in line.split(" & ")]


@contextmanager
def started(words: list[str], env: dict[str, str], folder: Path) -> Iterator[None]:
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        end_group(process.pid, 20)
        process.wait()


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_server_without_services_and_its_services_record_a_run(tmp_path: Path) -> None:
    exported, (upgrade, serve, services) = documented()
    with ExitStack() as stack:
        database, broker = stack.enter_context(postgres()), stack.enter_context(redis())
        port = free_port()
        url = f"http://127.0.0.1:{port}/api"
        own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        env = own | {name: value.replace("redis://127.0.0.1:6379/0", broker.url)
                     for name, value in exported.items()}  # fmt: skip
        env |= {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database.url,
            "PREFECT_REDIS_MESSAGING_URL": broker.url,
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_API_URL": url,
        }
        assert broker.url in env["PREFECT_SERVER_DOCKET_URL"]
        done = subprocess.run(
            [sys.executable, "-m", *upgrade], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        stack.enter_context(started(serve, env, tmp_path))
        stack.enter_context(started(services, env, tmp_path))

        def logged() -> str:
            return (tmp_path / "server.log").read_text(errors="replace")[-6000:]

        deadline = time.monotonic() + LIMIT_S
        while not healthy(url):
            assert time.monotonic() < deadline, logged()
            time.sleep(_POLL_S)
        ran = subprocess.run(
            [sys.executable, "-c", _RUN_A_FLOW],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        flow_run = ran.stdout.split()[-1]
        which = {
            "flow_runs": {"id": {"any_": [flow_run]}},
            "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        }
        # The server itself does not record what task runs report: the services do.
        while httpx.post(f"{url}/task_runs/count", json=which, trust_env=False).json() != 1:
            assert time.monotonic() < deadline, logged()
            time.sleep(_POLL_S)
        found = httpx.get(f"{url}/flow_runs/{flow_run}", trust_env=False).json()
        assert found["state_type"] == "COMPLETED"
