"""`gyre runs`, `show`, `report`, `attach` and a stored `evaluate`, on hand-written runs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from configs.load import load_config
from flows.cli import app
from flows.held_out import HeldOut, ceiling_run, find_evaluations
from storage.journal import append_line
from storage.run import create_run, open_run
from tests.flows.recorded import PROBLEMS, STEPS, UPDATES, record_run


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A port where nothing listens in place of a Prefect server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{probe.getsockname()[1]}/api")
        monkeypatch.setenv("PREFECT_HOME", os.devnull)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    record_run(root, "whole")
    record_run(root, "half", steps=2)
    create_run(str(root), "fresh", load_config("smoke", ["seed=5"], environment={}))
    return root


def gyre(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--root", str(root)])


def test_runs_are_listed_with_where_they_are(root: Path) -> None:
    listed = json.loads(gyre(root, "runs", "--json").output)
    runs = {run["run"]: run for run in listed["runs"]}
    assert {name: run["state"] for name, run in runs.items()} == {
        "whole": "done",
        "half": "unfinished",
        "fresh": "new",
    }
    assert runs["half"]["steps_done"] == 2 and runs["whole"]["steps_done"] == STEPS
    assert runs["fresh"]["seed"] == 5
    text = gyre(root, "runs").output
    assert f"6/{STEPS}" in text and "0.562" in text and "+0.188" in text


def test_a_run_that_cant_be_read_hides_no_other(tmp_path: Path) -> None:
    record_run(tmp_path, "good", steps=0)
    bad = create_run(str(tmp_path), "bad", load_config("smoke", environment={}))
    append_line(bad.store, bad.layout.metrics, b"{}")
    listed = json.loads(gyre(tmp_path, "runs", "--json").output)
    assert [run["run"] for run in listed["runs"]] == ["good"]
    assert [run["run"] for run in listed["unreadable"]] == ["bad"]
    assert "bad can't be read" in gyre(tmp_path, "runs").output


def test_an_empty_root_is_said(tmp_path: Path) -> None:
    assert "no runs in" in gyre(tmp_path, "runs").output


def test_show_has_steps_and_the_paired_gain(root: Path) -> None:
    shown = json.loads(gyre(root, "show", "whole", "--json").output)
    assert len(shown["updates"]) == STEPS * UPDATES
    (gain,) = shown["held_out"]["gains"]
    assert gain["mean"] == pytest.approx(0.1875) and gain["problems"] == PROBLEMS
    text = gyre(root, "show", "whole").output
    assert "0 to 12" in text and "pass@2" in text


def test_a_run_that_is_not_there_is_one_clear_error(root: Path) -> None:
    for command in ("show", "report", "attach", "evaluate"):
        result = gyre(root, command, "nothing")
        assert result.exit_code == 2
        assert "no run 'nothing'" in result.stderr and "half" in result.stderr


def test_report_goes_where_it_is_asked_for(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert gyre(root, "report", "half", "--out", str(out)).output.strip() == str(out)
    assert "<h2>Pass rate</h2>" in out.read_text(encoding="utf-8")
    where = gyre(root, "report", "half").output.strip()
    assert where.endswith("runs/half/report.html") and Path(where).is_file()


def test_attach_to_a_run_that_is_not_under_way_says_where_it_ended(root: Path) -> None:
    half = gyre(root, "attach", "half")
    assert half.exit_code == 0
    assert "not under way" in half.output and "unfinished" in half.output
    assert "gyre train --resume half" in half.output
    assert "--resume" not in gyre(root, "attach", "whole").output


def test_what_is_stored_is_not_evaluated_again(root: Path) -> None:
    found = json.loads(gyre(root, "evaluate", "whole", "--version", "0", "--json").output)
    assert [result["policy"] for result in found["versions"]] == ["0", "12"]
    assert found["versions"][0]["pass_at"]["2"]["mean"] == pytest.approx(5 / 12)
    assert found["ceiling"] is None and found["reached"] is None


def test_evaluations_of_other_problems_are_kept_apart(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    own = HeldOut.of(run, None, None, None)
    assert HeldOut.of(run, PROBLEMS, 2, 1).key(run.layout, 3) == run.layout.evaluation(3)
    other = HeldOut.of(run, PROBLEMS, 4, 1)
    record = find_evaluations(run, own)[0].model_copy(update={"version": 0, "samples": 4})
    run.store.write_record(other.key(run.layout, 0), record)
    assert find_evaluations(run, other) == {0: record}
    assert set(find_evaluations(run, own)) == {0, STEPS * UPDATES}
    # No execution of one is taken for one of the other.
    names = [{query.query_id for query in one.queries(run, 0)} for one in (own, other)]
    assert not names[0] & names[1]
    assert [query.problem_id for query in own.queries(run, 0)] == [
        query.problem_id for query in other.queries(run, 12)
    ]


def test_the_ceiling_is_a_run_of_its_own_beside_the_others(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    beside = ceiling_run(run)
    assert beside.run_id == "recorded-ceiling"
    assert beside.config.warm_start.error_share == 0
    assert beside.config.evaluation == run.config.evaluation
    best = find_evaluations(run, HeldOut.of(run, None, None, None))[12].model_copy(
        update={"version": 0, "rates": {f"p{n}": 1.0 for n in range(PROBLEMS)}}
    )
    beside.store.write_record(beside.layout.evaluation(0), best)
    found = json.loads(
        gyre(tmp_path, "evaluate", "recorded", "--version", "0", "--ceiling", "--json").output
    )
    assert found["ceiling"]["pass_rate"]["mean"] == 1.0
    assert found["reached"] == pytest.approx((0.75 - 0.5625) / (1 - 0.5625))
    assert [(gain["before"], gain["after"]) for gain in found["gains"]] == [
        ("0", "12"),
        ("12", "ceiling"),
    ]
    text = gyre(tmp_path, "evaluate", "recorded", "--version", "0").output
    assert "43% of the way" in text


def test_a_result_of_an_older_version_is_still_read(tmp_path: Path) -> None:
    run = record_run(tmp_path, steps=0)
    key = run.layout.evaluation(0)
    old = json.loads(run.store.read(key))
    for field in ("samples", "seed", "rewards", "crc"):
        del old[field]
    run.store.write(key, json.dumps(old).encode())
    shown = json.loads(gyre(tmp_path, "show", "recorded", "--json").output)
    assert shown["held_out"]["versions"][0]["pass_at"] == {}
    assert "0.562" in gyre(tmp_path, "show", "recorded").output


def test_only_a_warm_started_policy_has_a_ceiling(tmp_path: Path) -> None:
    settings = ["model.source=hf_directory", f"model.path={tmp_path}"]
    create_run(str(tmp_path), "own", load_config("smoke", settings, environment={}))
    assert open_run(str(tmp_path), "own").config.model.path == str(tmp_path)
    result = gyre(tmp_path, "evaluate", "own", "--ceiling")
    assert result.exit_code == 2 and "has a ceiling" in result.stderr
