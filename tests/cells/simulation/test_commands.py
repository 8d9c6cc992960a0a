"""The commands: JSON, table, page, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from cells.scheduler import POLICY_NAMES
from cells.simulation.compare import compare
from cells.simulation.published import Figure, Kind, Row, row_for
from cells.simulation.report import row_value
from cells.simulation.workload import Origin, Source, Workload
from flows.simulate_cli import register
from tests.cells.simulation.conftest import small_workload


def gyre(*arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def file(tmp_path: Path, small: Workload) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small.model_dump(mode="json")))
    return path


def test_simulate_prints_one_json_object(file: Path) -> None:
    found = json.loads(gyre("simulate", str(file), "--seeds", "2", "--json").stdout)
    assert found["workload"] == "small"
    assert set(found["policies"]) == set(POLICY_NAMES)
    elastic = found["policies"]["elastic"]
    assert elastic["hours"]["low"] <= elastic["hours"]["median"] <= elastic["hours"]["high"]
    assert 0 < elastic["share_of_bound"]["median"] <= 1
    tokens = [policy["trained_tokens"] for policy in found["policies"].values()]
    assert all(each == pytest.approx(tokens[0]) for each in tokens)
    assert found["colocate_limit"] == 1.75


def test_the_seeds_can_begin_elsewhere(file: Path) -> None:
    arguments = ("simulate", str(file), "--policy", "elastic", "--seeds", "2", "--json")
    assert json.loads(gyre(*arguments, "--first-seed", "7").stdout)["seeds"] == [7, 8]


def test_a_parameter_can_be_changed(file: Path) -> None:
    arguments = ("simulate", str(file), "--seeds", "1", "--json", "--set", "cells.count=2")
    found = json.loads(gyre(*arguments, "--set", "cells.async_training_cells=1").stdout)
    assert found["cells"] == 2
    assert found["colocate_limit"] == 1.5


def test_simulate_prints_a_table(file: Path) -> None:
    result = gyre("simulate", str(file), "--seeds", "1", "--policy", "elastic")
    assert result.exit_code == 0
    assert "elastic" in result.stdout
    assert "colocate " not in result.stdout


def test_the_page_is_self_contained(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ("--seeds", "1", "--policy", "elastic", "--report", str(page))
    assert gyre("simulate", str(file), *arguments).exit_code == 0
    text = page.read_text()
    assert "prefers-color-scheme: dark" in text
    assert "cell-003" in text
    assert "switching" in text
    assert "<script src=" not in text
    assert "<link" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate",), "give a workload or --from-run"),
        (("simulate", "nothing"), "no workload 'nothing'; there are published_122b_deepswe"),
        (("simulate", "published", "--policy", "elastic"), "--assumptions take no --from-run"),
        (("simulate", "published_ablation", "--policy", "quick"), "no policy 'quick'"),
        (("simulate", "published_ablation", "--set", "cells.size=8"), "no parameter 'cells.size'"),
        (("simulate", "published_ablation", "--set", "cells.count=x"), "valid integer"),
        (("plan", "--gpus", "2", "--parameters", "900"), "need at least 225 GPUs"),
    ],
)
def test_what_cannot_be_done_exits_with_2_and_says_why(
    arguments: tuple[str, ...], message: str
) -> None:
    result = gyre(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_plan_prints_options(file: Path) -> None:
    arguments = ("--gpus", "4", "--parameters", "4", "--workload", str(file), "--seeds", "1")
    found = json.loads(gyre("plan", *arguments, "--json").stdout)
    assert {option["gpus_per_cell"] for option in found["options"]} == {1, 2, 4}
    assert "fastest first" in gyre("plan", *arguments).stdout


def test_plan_takes_durations_that_were_measured(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    rows = [f"p{problem},{60 * (1 + problem + turn)}" for problem in range(8) for turn in range(4)]
    log.write_text("\n".join(["problem,seconds", *rows]))
    arguments = ("--gpus", "4", "--parameters", "4", "--workload", str(file), "--seeds", "1")
    measured = gyre("plan", *arguments, "--durations", str(log), "--json")
    assert measured.exit_code == 0, measured.stderr
    found, plain = (
        json.loads(measured.stdout),
        json.loads(gyre("plan", *arguments, "--json").stdout),
    )
    assert found["options"] != plain["options"]


def test_a_row_knows_how_far_it_is_from_the_published_range() -> None:
    comparison = compare(small_workload(), (0, 1, 2))
    hours = comparison.hours("async").median

    def row(low: float, high: float) -> Row:
        figure = Figure(
            workload="x", kind=Kind.HOURS, baseline="async", low=low, high=high, fitted=False
        )
        return row_for(figure, comparison)

    assert row(hours * 0.9, hours * 1.1).off == 0
    assert row(hours * 1.05, hours * 1.1).off == pytest.approx(1 / 1.05 - 1)
    assert row(hours * 0.8, hours * 0.95).within
    assert not row(hours * 0.5, hours * 0.8).within


def test_a_row_counts_the_chosen_assumptions_that_its_policies_depend_on() -> None:
    chosen = Source(origin=Origin.CHOSEN, note="a test")
    values = {"durations.median_s": 900, "cells.async_training_cells": 1}
    comparison = compare(small_workload().with_values(values, chosen), (0,))

    def counted(kind: Kind, baseline: str) -> list[str]:
        figure = Figure(workload="x", kind=kind, baseline=baseline, low=1, high=1, fitted=False)
        value = row_value(row_for(figure, comparison))
        assert value["chosen_assumptions"] == len(value["chosen"])
        return sorted(value["chosen"])

    assert counted(Kind.GAIN, "colocate") == ["durations.median_s"]
    assert counted(Kind.HOURS, "elastic") == ["durations.median_s"]
    assert counted(Kind.GAIN, "async") == sorted(values)
    assert counted(Kind.SAVED, "async") == sorted(values)


def test_every_kind_of_figure_is_computed() -> None:
    comparison = compare(small_workload(), (0,))
    for kind in Kind:
        figure = Figure(workload="x", kind=kind, baseline="colocate", low=1, high=1, fitted=True)
        row = row_for(figure, comparison)
        assert row.simulated.low <= row.simulated.median <= row.simulated.high
        assert (row.limit == 1.75) == (kind is Kind.GAIN)
