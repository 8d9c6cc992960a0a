"""What specifications promise: stable ids, disjoint splits, the wording the policy learns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.problems import ProblemsConfig, SpecRepoConfig
from storage.records import Split
from tasks.problems.source import Problem, ProblemSourceError, make_source
from tasks.problems.specrepo.operations import OPERATIONS, operations_up_to
from tasks.problems.specrepo.source import SpecRepo
from tasks.problems.specrepo.specification import ProblemName, make_specification
from tasks.problems.specrepo.words import WORDS

configs = st.builds(
    lambda files, least, more, level, slow, median: SpecRepoConfig(
        files=files,
        functions_min=least,
        functions_max=least + more,
        difficulty=level,
        slow_share=slow,
        slow_median_s=median,
    ),
    st.integers(1, 16),
    st.integers(1, 30),
    st.integers(0, 34),
    st.integers(1, 3),
    st.floats(0, 1),
    st.floats(0, 86_400),
)
seeds = st.integers(0, 2**31 - 1)


def triples(specification):
    return {(f.name, f.operation.name, f.constant) for f in specification.functions}


@settings(max_examples=60, deadline=None)
@given(configs, seeds, seeds)
def test_splits_never_share_a_function(config, seed, other):
    source = SpecRepo(ProblemsConfig(specrepo=config))
    made = {
        split: set().union(
            *(triples(source.specification(i)) for i in source.ids(split, 4, number))
        )
        for split, number in ((Split.TRAIN, seed), (Split.HELD_OUT, other))
    }
    assert not made[Split.TRAIN] & made[Split.HELD_OUT]


@settings(max_examples=60, deadline=None)
@given(configs, seeds, st.sampled_from(Split), st.integers(0, 10**6))
def test_an_id_holds_everything(config, seed, split, number):
    name = ProblemName.of(config, split, seed, number)
    assert ProblemName.parse(str(name)) == name
    # Another source with other settings makes the same problem of the same id.
    first = SpecRepo(ProblemsConfig(specrepo=config)).load(str(name))
    assert SpecRepo(ProblemsConfig()).load(str(name)) == first
    assert first.split is split


@settings(max_examples=60, deadline=None)
@given(configs, seeds)
def test_settings_bound_the_package(config, seed):
    source = SpecRepo(ProblemsConfig(specrepo=config))
    for problem_id in source.ids(Split.TRAIN, 3, seed):
        made = source.specification(problem_id)
        assert config.functions_min <= len(made.functions) <= config.functions_max
        assert 1 <= len(made.files) <= config.files
        assert all(file.functions for file in made.files)
        assert all(f.operation.level <= config.difficulty for f in made.functions)
        names = [f.name for f in made.functions]
        assert len(set(names)) == len(names)
        assert len({file.path for file in made.files}) == len(made.files)


def test_longer_lists_of_ids_begin_with_shorter_ones():
    source = SpecRepo(ProblemsConfig())
    assert source.ids(Split.TRAIN, 9, 3)[:4] == source.ids(Split.TRAIN, 4, 3)
    assert len(set(source.ids(Split.TRAIN, 50, 3) + source.ids(Split.TRAIN, 50, 4))) == 100


def test_wording_of_level_one():
    problem = SpecRepo(ProblemsConfig()).load("specrepo-train-1-0-d1f1n2to4")
    assert problem == Problem(
        "specrepo-train-1-0-d1f1n2to4",
        Split.TRAIN,
        "file: palu.py\ntidi(x): x plus 8\ndene(x): smaller of x and 5\n"
        "kuze(x): 19 minus x\nkota(x): x squared",
        {},
        0.0,
    )


def test_slow_tools_have_a_long_tail():
    config = SpecRepoConfig(slow_share=0.5, slow_median_s=2.0, slow_sigma=1.0)
    source = SpecRepo(ProblemsConfig(specrepo=config))
    delays = [source.load(i).tool_delay_s for i in source.ids(Split.TRAIN, 400, 1)]
    slow = sorted(delay for delay in delays if delay)
    assert 150 < len(slow) < 250
    assert 1.5 < slow[len(slow) // 2] < 2.7
    assert slow[int(len(slow) * 0.95)] > 6


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_references_answer_every_input(operation):
    for constant in range(2, 20):
        values = operation.expected(constant)
        assert len(values) == len(operation.inputs)
        assert all(type(value) in (int, list) for value in values)


def test_levels_grow():
    sizes = [len(operations_up_to(level)) for level in (1, 2, 3)]
    assert sizes[0] == 10 < sizes[1] < sizes[2]
    assert len(set(WORDS)) == 128


@pytest.mark.parametrize("text", ["", "specrepo-test-1-0-d1f1n2to4", "x-train-1-0-d1f1n2to4"])
def test_foreign_ids_are_refused(text):
    with pytest.raises(ProblemSourceError, match="not a specrepo id"):
        SpecRepo(ProblemsConfig()).load(text)


class OwnSource:
    """A source as a user writes one."""

    def __init__(self, config):
        self.config = config

    def ids(self, split, count, seed):
        return [f"own-{number}" for number in range(count)]

    def load(self, problem_id):
        return Problem(problem_id, Split.TRAIN, "do it", {}, 0.0)

    def evaluate(self, problem, workspace, limits, enclosure=None):
        raise NotImplementedError


class NoSource:
    """Lacks what a source needs."""


def test_an_own_source_is_an_import_path_away():
    source = make_source(ProblemsConfig(source=f"{__name__}:OwnSource"))
    assert source.load(source.ids(Split.TRAIN, 1, 0)[0]).instruction == "do it"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nonesuch", "give one of .*specrepo"),
        ("no.such.module:Thing", "can't be imported"),
        (f"{__name__}:Nothing", "has no class Nothing"),
        (f"{__name__}:NoSource", "NoSource lacks ids, load, evaluate"),
    ],
)
def test_a_wrong_source_says_what_is_wrong(path, text):
    with pytest.raises(ProblemSourceError, match=text):
        make_source(ProblemsConfig(source=path))


def test_equal_names_make_equal_specifications():
    name = ProblemName.of(SpecRepoConfig(), Split.HELD_OUT, 5, 77)
    assert make_specification(name) == make_specification(ProblemName.parse(str(name)))
