"""`gyre rescore` on a finished run, with a real Prefect server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.console import ExitCode
from flows.plan import step_plan
from storage.layout import execution_id
from storage.run import Run, open_run
from tasks.scoring.verdicts import newest_verdict, read_verdict
from tests.flows.conftest import FinishedRun, finish, start_gyre
from tests.flows.orchestrated import logs

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def members(run: Run, step: int) -> list[str]:
    return [
        execution_id(query.query_id, member)
        for query in step_plan(run, step, 0).queries
        for member in range(query.group_size)
    ]


def sealed(run: Run) -> list[bytes]:
    plan = step_plan(run, 0, 0)
    return [run.store.read(run.layout.group(query.query_id)) for query in plan.queries]


def test_verdicts_are_added_and_what_was_trained_stays(
    smoke_run: FinishedRun, tmp_path: Path
) -> None:
    """On a copy, because other tests count the verdicts of the run."""
    root = tmp_path / "copy"
    shutil.copytree(smoke_run.run.store.url, root)
    run = open_run(str(root), smoke_run.run.run_id)
    before, groups = (
        {name: newest_verdict(run.store, run.layout, name) for name in members(run, 0)},
        sealed(run),
    )
    command = start_gyre(root, "rescore", run.run_id, "--step", "0")
    output = finish(command, root)
    assert command.returncode == 0, f"{output[-4000:]}\n{logs(root)}"
    assert f"evaluated {len(before)}, changed 0, late {len(before)}, failed 0" in output
    for name, first in before.items():
        newest = newest_verdict(run.store, run.layout, name)
        assert first is not None and newest is not None
        assert read_verdict(run.store, run.layout, name, first.version) == first
        assert (newest.version, newest.late) == (first.version + 1, True)
    for name in members(run, 1):
        assert len(run.store.children(run.layout.verdicts(name))) == 1
    assert sealed(run) == groups
    failed = ("rescore", run.run_id, "--step", "0", "--state", "excluded", "--reason", "evaluator")
    nothing = CliRunner().invoke(app, [*failed, "--root", str(root)])
    assert nothing.exit_code == ExitCode.BAD_INPUT
    assert "no preserved execution is like that" in nothing.output
