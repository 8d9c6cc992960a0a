"""`gyre problems`, and what `gyre rescore` refuses, on a hand-written run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.console import ExitCode
from storage.layout import execution_id, query_id
from tests.flows.recorded import MEMBERS, QUERIES, STEPS, record_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    record_run(root, "whole")
    begun = record_run(root, "begun", steps=1)
    for member in range(MEMBERS):  # of its last problem nothing has ended
        begun.store.delete(begun.layout.execution(execution_id(query_id(0, 3), member)))
    begun.store.delete(begun.layout.verdicts(execution_id(query_id(0, 2), 0)))
    return root


def gyre(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--root", str(root)])


def rows(root: Path, *arguments: str) -> list[dict[str, float]]:
    result = gyre(root, "problems", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, float]] = json.loads(result.output)["problems"]
    return found


def test_the_hardest_come_first_with_their_counts(root: Path) -> None:
    found = rows(root, "whole")
    assert len(found) == QUERIES
    assert sum(row["executions"] for row in found) == STEPS * QUERIES * MEMBERS
    assert sum(row["timed_out"] for row in found) == STEPS
    rates = [row["pass_rate"] for row in found]
    assert rates == sorted(rates)
    table = gyre(root, "problems", "whole")
    assert all(f"{rate:.3f}" in table.output for rate in rates)


def test_rates_choose(root: Path) -> None:
    every = rows(root, "whole")
    middle = every[1]["pass_rate"]
    chosen = rows(root, "whole", "--min", str(middle), "--max", str(middle))
    assert chosen == [row for row in every if row["pass_rate"] == middle]
    refused = gyre(root, "problems", "whole", "--min", "0.9", "--max", "0.1")
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert "--min 0.9 is above --max 0.1" in refused.stderr


def test_what_has_not_ended_is_not_called_excluded(root: Path) -> None:
    found = {row["problem_id"]: row for row in rows(root, "begun")}
    assert sorted(found) == ["p0", "p1", "p2"]
    assert found["p1"]["excluded"] == 0
    assert found["p2"]["excluded"] == 1  # it ended, and has no verdict


def test_a_run_without_workspaces_has_nothing_to_rescore(root: Path) -> None:
    result = gyre(root, "rescore", "whole")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "no preserved execution is like that" in result.stderr
