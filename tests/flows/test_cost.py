"""What the orchestration costs is measured on its own processes, and says when events were lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson

from configs.run import RunConfig
from flows.cost import Cost, Meter
from flows.server import Orchestration
from storage.run import create_run

_BUSY_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print("ready", flush=True)
sys.stdin.read()
child.kill()
"""


def _meter(tmp_path: Path, *processes: subprocess.Popen[bytes], own_server: bool = True) -> Meter:
    prefect = Orchestration(
        api_url="", ui_url="", check=lambda: None, started=processes, own_server=own_server
    )
    return Meter(prefect, tmp_path)


def test_what_a_worker_starts_is_not_counted_as_its_own(tmp_path: Path) -> None:
    run = create_run(str(tmp_path), "r", RunConfig())
    (tmp_path / "server.log").write_text("")
    worker = subprocess.Popen(
        [sys.executable, "-c", _BUSY_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        before = sum(os.times()[:2])
        meter = _meter(tmp_path, worker)
        while sum(os.times()[:2]) < before + 0.5:
            pass
        assert meter.read(run, "f").server_s < 0.2
    finally:
        worker.communicate(b"", timeout=30)


def test_lost_events_are_counted_and_unknown_ones_are_not_zero(tmp_path: Path) -> None:
    run = create_run(str(tmp_path), "r", RunConfig())
    proof = {"flow": {"pid": 1, "cpu_s": 2.5}, "prefect": {"flow_run_id": "f"}}
    run.store.write(run.layout.manifest, orjson.dumps(proof))
    (tmp_path / "server.log").write_text(
        "started\nSubscription queue is full, dropping message for topic='events'\n"
    )
    cost = _meter(tmp_path).read(run, "f")
    assert cost.dropped == 1
    assert cost.flow_s == 2.5
    assert "dropped events: 1" in cost.line()
    assert _meter(tmp_path, own_server=False).read(run, "f").dropped is None


def test_what_another_flow_run_took_is_not_counted(tmp_path: Path) -> None:
    run = create_run(str(tmp_path), "r", RunConfig())
    (tmp_path / "server.log").write_text("")
    proof = {"flow": {"pid": 1, "cpu_s": 2.5}, "prefect": {"flow_run_id": "train"}}
    run.store.write(run.layout.manifest, orjson.dumps(proof))
    cost = _meter(tmp_path).read(run, "rescore")
    assert cost.flow_s is None
    assert "flow" not in cost.line()


def test_the_share_is_of_all_cores() -> None:
    cost = Cost(server_s=10, flow_s=10, wall_s=100, cores=2, dropped=0)
    assert cost.share == 0.1
    assert cost.line() == (
        "orchestration: 20 CPU s (server and worker 10, flow 10), 10.0% of 2 cores in 100 s; "
        "dropped events: 0"
    )
