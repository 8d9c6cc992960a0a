"""A server on PostgreSQL and Redis, as Gyre starts it, records a burst of task runs whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXECUTIONS, GROUP = 64, 8


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_every_task_run_of_a_burst_is_recorded() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.orchestration", "--scaled"]
    command += ["--executions", str(EXECUTIONS), "--group-size", str(GROUP)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["database"] == "PostgreSQL, Redis"
    assert found["task_runs_recorded"] == found["task_runs"] == 3 * EXECUTIONS // GROUP + 2
    assert found["dropped_events"] == 0
    assert found["databases_cpu_ms_per_execution"] > 0
    assert found["mb_per_step"] >= 0
