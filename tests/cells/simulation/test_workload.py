"""Workload files: every parameter has a source, and what is shipped can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from cells.simulation.durations import DurationLogError, read_durations, with_durations
from cells.simulation.executions import Draws
from cells.simulation.published import Kind, published_figures, published_workloads
from cells.simulation.workload import LognormalDurations, Workload, load_workload
from configs.workloads import workload_names, workload_path
from tests.cells.simulation.conftest import small_workload


@pytest.mark.parametrize("name", workload_names())
def test_every_shipped_workload_can_be_read_and_drawn(name: str) -> None:
    workload = load_workload(workload_path(name))
    group = Draws(workload, 0).query(0)
    assert len(group) == workload.batch.executions_per_query
    assert all(0 < e.nominal_s <= workload.execution.timeout_s for e in group)


def test_a_parameter_without_a_source_is_refused(small: Workload) -> None:
    data = small.model_dump()
    del data["sources"]["training.pull_s"]
    with pytest.raises(ValidationError, match=r"no source for training\.pull_s"):
        Workload.model_validate(data)
    data["sources"] = {**small.model_dump()["sources"], "serving.magic": _source()}
    with pytest.raises(ValidationError, match=r"do not exist: serving\.magic"):
        Workload.model_validate(data)


def test_nothing_is_fitted_to_the_ablation_nor_to_one_gain_of_each_122b_workload() -> None:
    ablation = [f for f in published_figures() if f.workload == "published_ablation"]
    assert len(ablation) >= 3
    assert not any(figure.fitted for figure in ablation)
    for name in ("nl2repo", "deepswe", "terminalbench"):
        gains = [f for f in published_figures() if f.workload == f"published_122b_{name}"]
        assert [figure.fitted for figure in gains].count(False) >= 1
        assert {figure.kind for figure in gains} == {Kind.GAIN}


def test_the_ablation_has_no_parameter_of_its_own() -> None:
    workloads = published_workloads()
    own = {"name", "batch", "sources"}
    ablation = workloads["published_ablation"].model_dump(exclude=own)
    assert ablation == workloads["published_122b_nl2repo"].model_dump(exclude=own)


def test_one_benchmark_has_one_distribution_of_durations_but_for_the_median() -> None:
    workloads = published_workloads()
    small, large = (
        workloads[f"published_{size}_nl2repo"].durations.model_dump(exclude={"median_s"})
        for size in ("122b", "2_4t")
    )
    assert small == large


def test_durations_are_correlated_inside_a_query() -> None:
    workload = small_workload(
        durations__sigma_query=0.8, durations__sigma_execution=0.3, execution__timeout_s=1e9
    )
    draws = Draws(workload, 3)
    logs = np.log([[e.nominal_s for e in draws.query(q)] for q in range(400)])
    assert isinstance(workload.durations, LognormalDurations)
    assert np.median(logs) == pytest.approx(np.log(workload.durations.median_s), abs=0.1)
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(0.3, abs=0.03)
    assert logs.mean(axis=1).std(ddof=1) == pytest.approx((0.64 + 0.09 / 4) ** 0.5, abs=0.07)


def test_the_blocks_of_an_execution_add_up_to_its_duration(small: Workload) -> None:
    serving = small.serving
    for execution in Draws(small, 1).query(5):
        tools = sum(block.tool_s for block in execution.blocks)
        work = sum(serving.work(b.prompt_tokens, b.output_tokens) for b in execution.blocks)
        seconds = tools + work / serving.speed(serving.nominal_requests)
        assert seconds == pytest.approx(execution.nominal_s)
        assert all(b.output_tokens > 0 and b.prompt_tokens >= 0 for b in execution.blocks)


def test_a_duration_log_replaces_the_durations(tmp_path: Path, small: Workload) -> None:
    log = tmp_path / "log.csv"
    log.write_text("problem,seconds\na,10\na,20\nb,700\n")
    workload = with_durations(small, read_durations(log), "a test")
    seen = {e.nominal_s for q in range(20) for e in Draws(workload, 0).query(q)}
    assert seen == {10.0, 20.0, 700.0}
    by_query = [{e.nominal_s for e in Draws(workload, 0).query(q)} for q in range(20)]
    assert all(found <= {10.0, 20.0} or found == {700.0} for found in by_query)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task,seconds\na,1\n", "columns problem and seconds"),
        ("problem,seconds\na,soon\n", "line 2: 'soon'"),
        ("problem,seconds\na,-1\n", "line 2: '-1'"),
        ("problem,seconds\n", "no rows"),
    ],
)
def test_a_bad_duration_log_is_named(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "log.csv"
    log.write_text(text)
    with pytest.raises(DurationLogError, match=message):
        read_durations(log)


def _source() -> dict[str, str]:
    return {"origin": "assumed", "note": "a test"}
