"""Listed sources and mixtures: splits that stay, epochs without repeats, shares by weight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError, load_config
from configs.problems import ProblemsConfig, SourceConfig
from storage.records import Split
from tasks.problems.evaluation import TestReport
from tasks.problems.listed import ListedSource, epoch_slice
from tasks.problems.mixture import Mixture, turns
from tasks.problems.source import Problem, ProblemSourceError, make_source, step_problems

NAMES = tuple(f"task-{number}" for number in range(40))
seeds = st.integers(0, 2**31 - 1)


class Listed(ListedSource):
    """A source whose tests look whether a file is there."""

    def __init__(self, config, names=NAMES):
        super().__init__(config, names, "listed")

    def load(self, problem_id):
        return Problem(problem_id, self.split_of(problem_id), f"do {problem_id}", {})

    def evaluate(self, problem, workspace, limits, enclosure=None):
        return TestReport(int((workspace / problem.problem_id).exists()), 1, "", False)


def listed(**settings):
    return Listed(SourceConfig(source="own:Source", **settings))


@given(seeds, st.integers(1, 30), st.integers(1, 70), st.integers(1, 6))
def test_no_problem_comes_again_before_all_others_came(seed, size, count, steps):
    names = NAMES[:size]
    row = [name for step in range(steps) for name in epoch_slice(names, seed, step * count, count)]
    for epoch in range(len(row) // size):
        assert sorted(row[epoch * size : (epoch + 1) * size]) == sorted(names)
    # A step needs nothing of the ones before.
    assert row[-count:] == epoch_slice(names, seed, (steps - 1) * count, count)


def test_epochs_and_seeds_differ():
    first, second = (epoch_slice(NAMES, 1, start, 40) for start in (0, 40))
    assert first != second and first != epoch_slice(NAMES, 2, 0, 40)


@given(st.sets(st.sampled_from(NAMES), min_size=4), st.floats(0.1, 0.9))
def test_a_name_stays_in_its_split_whatever_else_there_is(some, share):
    config = SourceConfig(source="own:Source", held_out_share=share)
    all_of_them, few = Listed(config), Listed(config, sorted(some))
    for split in Split:
        assert set(few.names(split)) == set(all_of_them.names(split)) & some
    assert not set(few.names(Split.TRAIN)) & set(few.names(Split.HELD_OUT))


def test_evaluation_never_takes_a_problem_twice():
    source = listed(held_out_share=0.5)
    held_out = source.names(Split.HELD_OUT)
    assert sorted(source.ids(Split.HELD_OUT, 1000, 1)) == sorted(held_out)
    assert source.ids(Split.HELD_OUT, 3, 1) == source.ids(Split.HELD_OUT, 5, 1)[:3]


def test_filters_choose_by_name():
    source = listed(include=("task-1*",), exclude=("task-1", "task-19"), held_out_share=0)
    assert source.names(Split.TRAIN) == tuple(f"task-1{number}" for number in range(9))
    with pytest.raises(ProblemSourceError, match=r"problems\.include"):
        listed(include=("nothing*",))
    with pytest.raises(ProblemSourceError, match="task-5"):
        source.load("task-5")


def test_a_marked_source_is_never_trained_on():
    source = listed(held_out=True)
    assert source.names(Split.HELD_OUT) == tuple(sorted(NAMES))
    with pytest.raises(ProblemSourceError, match="never trained on"):
        step_problems(source, 0, 4, 1)
    with pytest.raises(ConfigError, match="marked held_out"):
        load_config("quickstart", ["problems.held_out=true"], environment={})
    parts = "[{name: a, source: humaneval, held_out: true}]"
    overrides = ["problems.source=mixture", f"problems.mixture={parts}"]
    with pytest.raises(ConfigError, match="marked held_out"):
        load_config("quickstart", overrides, environment={})


def test_an_empty_split_says_what_to_change():
    with pytest.raises(ProblemSourceError, match=r"larger problems\.held_out_share"):
        listed(held_out_share=0).ids(Split.HELD_OUT, 1, 1)
    with pytest.raises(ProblemSourceError, match=r"smaller problems\.held_out_share"):
        step_problems(listed(held_out_share=1), 0, 1, 1)


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 40), st.integers(1, 40)
)
def test_turns_follow_the_weights(weights, start, count):
    row = turns(weights, 0, start + count)
    assert turns(weights, start, count) == row[start:]
    had = Counter(row)
    for part, weight in enumerate(weights):
        share = weight / sum(weights) * len(row)
        assert abs(had[part] - share) < len(weights)


def mixture(**more):
    own = f"{__name__}:Listed"
    parts = [
        {"name": "a", "source": own, "weight": 3, "held_out_share": 0.25},
        {"name": "kept", "source": own, "held_out": True},
        {"name": "made", "source": "specrepo"},
    ]
    return make_source(ProblemsConfig(source="mixture", mixture=parts, **more))


def test_a_mixture_draws_by_weight_and_each_part_without_repeats():
    source = mixture()
    assert isinstance(source, Mixture)
    row = [name for step in range(8) for name in step_problems(source, step, 8, 1)]
    parts = Counter(name.partition("/")[0] for name in row)
    assert parts == {"a": 48, "made": 16}
    own = [name for name in row if name.startswith("a/")]
    size = len(source.sources["a"].names(Split.TRAIN))
    assert len(set(own[:size])) == size
    assert len({name for name in row if name.startswith("made/")}) == 16
    assert step_problems(mixture(), 5, 8, 1) == row[40:48]
    held_out = Counter(name.partition("/")[0] for name in source.ids(Split.HELD_OUT, 20, 1))
    assert set(held_out) == {"a", "kept", "made"}


def test_a_mixture_loads_and_tests_by_part(tmp_path):
    source = mixture()
    name = step_problems(source, 0, 8, 1)[0]
    problem = source.load(name)
    assert problem.problem_id == name
    assert source.evaluate(problem, tmp_path, None).passed == 0
    (tmp_path / name.partition("/")[2]).touch()
    assert source.evaluate(problem, tmp_path, None).passed == 1
    with pytest.raises(ProblemSourceError, match=r"part of problems\.mixture"):
        source.load("other/x")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["problems.source=mixture"], "must have parts"),
        (["problems.mixture=[{name: a}]"], "must have parts"),
        (["problems.source=harbor"], "needs path"),
        (["problems.path=/x"], "has no meaning"),
        (
            ["problems.source=mixture", "problems.mixture=[{name: a}, {name: a}]"],
            "one name",
        ),
        (
            ["problems.source=mixture", "problems.mixture=[{name: a, source: mixture}]"],
            "can't be a mixture",
        ),
    ],
)
def test_settings_of_sources_are_checked(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config("quickstart", overrides, environment={})
