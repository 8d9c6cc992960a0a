"""Sweeps: plans that can be run, first steps that are shared, and what counts as better."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.logging import disable_run_logger
from prefect.states import Completed, Running
from scipy import stats

from configs.load import ConfigError, load_config
from flows.plan import step_plan
from flows.rollouts import living
from flows.sweep.flow import _Trainings
from flows.sweep.page import render
from flows.sweep.plan import Axis, axis, keep_plan, make_plan
from flows.sweep.results import Results, read_results, results_value, verdict_line
from flows.sweep.share import check_source, find_shared, share_first_step
from storage.layout import evaluation_query_id, execution_id
from storage.objects import StorageError, Store
from storage.records import Evaluation, StepDone, VerdictRecord
from storage.run import create_run, open_run
from tasks.rollout.group import find_result
from tests.flows.recorded import MEMBERS, QUERIES, record_run

CAPS = Axis(key="trajectory.cap", values=("1", "none"))


def test_axes_are_read_as_they_are_written() -> None:
    assert axis("trajectory.cap=1,2, none").values == ("1", "2", "none")
    assert axis("cells.cells=[{name: a, core: true}],[{name: b}]").values == (
        "[{name: a, core: true}]",
        "[{name: b}]",
    )
    assert axis("problems.path='a,b',c").values == ("'a,b'", "c")


@pytest.mark.parametrize("text", ["trajectory.cap", "=1", "Trajectory cap=1"])
def test_an_axis_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--param"):
        axis(text)


def test_a_plan_has_each_point_with_each_seed(tmp_path: Path) -> None:
    rates = Axis(key="training.learning_rate", values=("1e-4", "5e-4"))
    plan, configs = make_plan("grid", [CAPS, rates], 3, "smoke", ["seed=5"], str(tmp_path))
    assert [point.values for point in plan.points] == [
        ("1", "1e-4"),
        ("1", "5e-4"),
        ("none", "1e-4"),
        ("none", "5e-4"),
    ]
    assert plan.seeds == (5, 6, 7)
    assert len(plan.runs) == len(configs) == 12
    for one in plan.runs:
        config = configs[one.run_id]
        assert config.seed == one.seed
        assert str(config.trajectory.cap).lower() == plan.points[one.point].values[0]
    assert [one.seed for one in plan.runs] == sorted(one.seed for one in plan.runs)


def test_every_point_is_checked_before_any_work(tmp_path: Path) -> None:
    wrong = Axis(key="training.learning_rate", values=("1e-4", "7", "-1"))
    with pytest.raises(ConfigError) as error:
        make_plan("grid", [wrong], 2, "smoke", [], str(tmp_path))
    assert "2 of 3 points" in str(error.value)
    assert "learning_rate 7" in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "axes", "seeds"),
    [
        ("Caps", [CAPS], 1),
        ("-caps", [CAPS], 1),
        ("../caps", [CAPS], 1),
        ("caps", [CAPS, CAPS], 1),
        ("caps", [Axis(key="seed", values=("1",))], 1),
        ("caps", [], 1),
        ("caps", [CAPS], 200),
        ("caps", [Axis(key="trajectory.cap", values=("1", "01"))], 1),
    ],
)
def test_what_is_no_sweep_is_refused(
    tmp_path: Path, name: str, axes: list[Axis], seeds: int
) -> None:
    with pytest.raises(ConfigError):
        make_plan(name, axes, seeds, "smoke", [], str(tmp_path))


def test_a_name_stands_for_one_plan(tmp_path: Path) -> None:
    store = Store(tmp_path)
    plan, _ = make_plan("caps", [CAPS], 1, "smoke", [], str(tmp_path))
    keep_plan(store, plan)
    keep_plan(store, plan)
    other, _ = make_plan("caps", [CAPS], 2, "smoke", [], str(tmp_path))
    with pytest.raises(ConfigError, match="exists with other points"):
        keep_plan(store, other)


class Listing:
    """Prefect's list of flow runs, of which some were deleted."""

    def __init__(self, *there: FlowRun) -> None:
        self.there = there

    def read_flow_runs(self, **_: object) -> list[FlowRun]:
        return list(self.there)


def test_a_training_that_was_deleted_in_prefect_is_not_waited_for(tmp_path: Path) -> None:
    plan, configs = make_plan("grid", [CAPS], 2, "smoke", [], str(tmp_path))
    done, running, deleted = (one.run_id for one in plan.runs[:3])
    ids = {name: uuid4() for name in (done, running, deleted)}
    listed = [
        FlowRun(id=ids[name], flow_id=uuid4(), state=state)
        for name, state in ((done, Completed()), (running, Running()))
    ]
    with disable_run_logger():
        trainings = _Trainings(plan, configs, str(tmp_path), None)
        trainings._alive = {ids[name]: name for name in ids}
        assert trainings._look(Listing(*listed))
        assert not trainings._look(Listing(*listed))
    assert trainings._alive == {ids[running]: running}
    assert {name: state.is_completed() for name, state in trainings._ended.items()} == {
        done: True,
        deleted: False,
    }


def test_only_points_with_the_same_rollouts_share_a_first_step(tmp_path: Path) -> None:
    source = record_run(tmp_path, "source")
    check_source(source)
    make_plan("caps", [CAPS], 2, "not looked at", [], str(tmp_path), source)
    sizes = Axis(key="rollout.group_size", values=("4", "8"))
    with pytest.raises(ConfigError, match="differs from run source in rollout"):
        make_plan("sizes", [sizes], 1, "", [], str(tmp_path), source)
    with pytest.raises(StorageError, match=r"plan\.json is not there"):
        check_source(create_run(str(tmp_path), "new", load_config("smoke")))


def test_a_shared_first_step_is_rolled_out_and_scored_already(tmp_path: Path) -> None:
    source = record_run(tmp_path, "source")
    plan, configs = make_plan("caps", [CAPS], 2, "", [], str(tmp_path), source)
    run = create_run(str(tmp_path), plan.runs[0].run_id, configs[plan.runs[0].run_id])
    share_first_step(source, run)
    share_first_step(source, run)
    shared = find_shared(run)
    assert shared is not None and shared.source == "source" and shared.evaluation
    own, theirs = step_plan(run, 0, 0), step_plan(source, 0, 0)
    assert own == theirs
    assert living(run, own.queries) == frozenset()
    for query in own.queries:
        assert not run.store.exists(run.layout.group(query.query_id))
        for member in range(query.group_size):
            name = execution_id(query.query_id, member)
            assert find_result(run, name) == find_result(source, name)
            kept = run.store.children(run.layout.verdicts(name))
            for verdict in kept:
                key = f"{run.layout.verdicts(name)}/{verdict}"
                assert not run.store.read_record(key, VerdictRecord).late
    assert shared.executions == QUERIES * MEMBERS
    assert run.store.exists(run.layout.evaluation(0))
    assert not run.store.exists(run.layout.step_plan(1))
    assert evaluation_query_id(0, 0) not in run.store.children(f"{run.layout.prefix}/executions")


def finished(root: Path, rates: dict[str, list[float]], problems: int = 100) -> Results:
    """A sweep over caps whose runs have ended with these pass rates, seed by seed."""
    seeds = len(next(iter(rates.values())))
    caps = Axis(key="trajectory.cap", values=tuple(rates))
    plan, configs = make_plan("caps", [caps], seeds, "smoke", ["training.steps=1"], str(root))
    keep_plan(Store(root), plan)
    for one in plan.runs:
        run = create_run(str(root), one.run_id, configs[one.run_id])
        rate = rates[plan.points[one.point].values[0]][one.seed - plan.seeds[0]]
        done = StepDone(step=0, policy_version=2, seconds=1.0)
        run.store.write_record(run.layout.step_done(0), done)
        run.store.write_record(run.layout.evaluation(2), evaluation(rate, problems))
        assert open_run(str(root), one.run_id) == run
    return read_results(Store(root), plan)


def evaluation(rate: float, problems: int) -> Evaluation:
    rates = {f"p{number}": float(number < rate * problems) for number in range(problems)}
    return Evaluation(
        version=2, problems=problems, executions=problems, excluded=0, timed_out=0, pass_rate=rate,
        standard_error=0.05, rates=rates, samples=1, seed=1,
    )  # fmt: skip


def test_a_clear_winner_wins_by_its_paired_interval(tmp_path: Path) -> None:
    rates = {"1": [0.30, 0.35, 0.32], "5": [0.80, 0.86, 0.83], "none": [0.20, 0.26, 0.22]}
    results = finished(tmp_path, rates)
    assert results.best == 1
    (over_one, over_none) = results.differences
    gains = [after - before for before, after in zip(rates["1"], rates["5"], strict=True)]
    problems = [
        np.mean([float(x < after * 100) - float(x < before * 100)
                 for before, after in zip(rates["1"], rates["5"], strict=True)])
        for x in range(100)
    ]  # fmt: skip
    error = np.sqrt(stats.sem(gains) ** 2 + stats.sem(problems) ** 2)
    expected = stats.t.interval(1 - 0.05 / 3, 2, loc=np.mean(gains), scale=error)
    assert over_one.interval == pytest.approx(expected)
    assert over_one.over == over_none.over == "seeds"
    assert over_one.beyond_noise and over_none.beyond_noise
    assert verdict_line(results).startswith("cap 5 wins: +0.507 over cap 1")
    value = results_value(results)
    assert value["best"] == "cap 5" and value["done"] == 9


def test_seeds_that_disagree_are_noise(tmp_path: Path) -> None:
    results = finished(tmp_path, {"1": [0.30, 0.60], "5": [0.58, 0.35]})
    assert results.best == 1
    (only,) = results.differences
    assert not only.beyond_noise
    assert "within noise of: cap 1" in verdict_line(results)


def test_few_problems_that_agree_are_noise(tmp_path: Path) -> None:
    results = finished(tmp_path, {"1": [0.0, 0.0], "5": [1.0, 1.0]}, problems=1)
    assert not results.differences[0].beyond_noise


def test_one_seed_is_compared_over_problems_and_says_so(tmp_path: Path) -> None:
    results = finished(tmp_path, {"1": [0.30], "5": [0.60]})
    (only,) = results.differences
    assert only.over == "problems" and only.gain.count == 100
    assert "how far another seed would be away is not known" in render(results)


def test_a_page_needs_no_other_file_and_names_what_was_shared(tmp_path: Path) -> None:
    source = record_run(tmp_path, "source")
    plan, configs = make_plan("caps", [CAPS], 2, "", [], str(tmp_path), source)
    for one in plan.runs:
        share_first_step(source, create_run(str(tmp_path), one.run_id, configs[one.run_id]))
    page = render(read_results(Store(tmp_path), plan))
    assert (
        "4 of 4 runs train their first step on the model calls and verdicts of run source" in page
    )
    assert "src=" not in page.partition("<body>")[2]
    assert "No run has ended yet." in page
