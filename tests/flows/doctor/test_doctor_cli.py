"""``gyre doctor``: rows, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.doctor.finding import ok

ROWS = {
    "python",
    "cores",
    "gpu",
    "open files",
    "packages",
    "sglang",
    "libraries",
    "sandbox",
    "harness",
    "storage",
    "disk",
    "gateway",
    "prefect",
    "layout",
    "policy",
    "locks",
    "memory",
    "/dev/shm",
    "rdma",
    "clock",
    "processes",
    "left over",
}


def doctor(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--root", str(root), *arguments])


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose memory and Prefect server are none of this test's business."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("flows.doctor.machine.memory", lambda config: ok("memory", "enough"))
    monkeypatch.setattr("flows.doctor.places.prefect_port", lambda config: ok("prefect", "free"))


def test_a_good_machine_has_all_rows_and_exit_code_0(tmp_path: Path) -> None:
    result = doctor(tmp_path / "root", "--config", "smoke", "--json")
    answer = json.loads(result.stdout)
    failed = [row for row in answer["checks"] if row["status"] == "fail"]
    assert (result.exit_code, failed) == (0, [])
    assert (answer["format"], answer["ready"]) == (1, True)
    assert {row["check"] for row in answer["checks"]} >= ROWS
    assert all(row["advice"] for row in answer["checks"] if row["status"] == "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_fails_is_exit_code_3_with_what_to_do(tmp_path: Path) -> None:
    pinned = ("--set", "cells.cells=[{name: a, core: true, cpus: [4095]}]")
    result = doctor(tmp_path, *pinned)
    assert result.exit_code == 3
    assert "cell a is pinned to [4095]" in result.output
    assert "leave cpus empty" in result.output
    assert "1 fail" in result.output
    answer = json.loads(doctor(tmp_path, *pinned, "--json").stdout)
    assert not answer["ready"]


def test_a_bad_configuration_is_exit_code_2(tmp_path: Path) -> None:
    assert doctor(tmp_path, "--set", "seeds=1").exit_code == 2


def test_a_model_directory_is_looked_into(tmp_path: Path) -> None:
    settings = ("--set", "model.source=hf_directory", "--set", f"model.path={tmp_path}")
    result = doctor(tmp_path, *settings)
    assert result.exit_code == 3
    assert "it lacks config.json, tokenizer.json, *.safetensors" in result.output
