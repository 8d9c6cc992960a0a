"""Other assumptions: each can be simulated, touches what it names, and is set beside the rest."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from cells.simulation import alternatives as module
from cells.simulation.alternatives import (
    Alternative,
    alternatives,
    alternatives_columns,
    alternatives_rows,
    alternatives_value,
    compare_alternatives,
)
from cells.simulation.published import Figure, Kind, published_workloads
from cells.simulation.workload import Origin, Source
from flows.simulate_cli import register
from tests.cells.simulation.conftest import small_workload


@pytest.fixture
def small_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """One workload with two figures and two alternatives, of which one is about Async alone."""
    figures = (_figure(Kind.SAVED, "async"), _figure(Kind.GAIN, "colocate"))
    tried = (
        Alternative(
            name="split",
            workload="small",
            settings={"cells.async_training_cells": 1},
            policies=("async", "async_streaming"),
        ),
        Alternative(name="slow", workload="small", settings={"training.tokens_per_s": 300}),
    )
    monkeypatch.setattr(module, "_load", lambda _: small_workload())
    monkeypatch.setattr(module, "published_figures", lambda: figures)
    monkeypatch.setattr(module, "alternatives", lambda: tried)


def _figure(kind: Kind, baseline: str) -> Figure:
    return Figure(workload="small", kind=kind, baseline=baseline, low=1, high=1, fitted=False)


def test_every_shipped_alternative_changes_something_that_is_allowed() -> None:
    workloads = published_workloads()
    for alternative in alternatives():
        shipped = workloads[alternative.workload]
        source = Source(origin=Origin.ASSUMED, note="a test")
        changed = shipped.with_values(alternative.settings, source).parameters()
        for name in alternative.settings:
            assert changed[name] != shipped.parameters()[name], alternative.name


@pytest.mark.usefixtures("small_case")
def test_an_alternative_changes_the_policies_that_it_names_and_no_other() -> None:
    shipped, split, slow = compare_alternatives(("small",), (0, 1))
    saved, gain = (row.simulated for row in shipped.rows)
    assert split.rows[0].simulated != saved
    assert split.rows[1].simulated == gain
    assert slow.rows[0].simulated != saved
    assert slow.rows[1].simulated != gain
    assert split.waits["async"].median < shipped.waits["async"].median


@pytest.mark.usefixtures("small_case")
def test_alternatives_as_table_and_json() -> None:
    variations = compare_alternatives(("small",), (0,))
    columns, rows = alternatives_columns(variations[0]), alternatives_rows(variations)
    assert columns[1] == "saved by streaming in async, 1"
    assert [row[0] for row in rows] == ["as shipped", "split", "slow"]
    assert {len(row) for row in rows} == {len(columns)}
    found = json.loads(json.dumps(alternatives_value(variations)))["variations"]
    assert [entry["alternative"] for entry in found] == [None, "split", "slow"]
    assert found[1]["settings"] == {"cells.async_training_cells": 1}
    assert 0 < found[0]["training_wait"]["async_streaming"]["median"] < 1


def test_a_workload_without_published_figures_has_no_alternatives() -> None:
    app = typer.Typer()
    register(app)
    arguments = ["simulate", "terminal_bench_recorded", "--assumptions"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--assumptions knows published, published_2_4t_nl2repo" in result.stderr
