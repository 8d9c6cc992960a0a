"""HumanEval: the data set's own solutions pass, and nothing else does."""

from __future__ import annotations

import pytest

from configs.problems import ProblemsConfig
from storage.records import Split
from tasks.problems.humaneval import FILE, HumanEval, Task, tasks
from tasks.problems.source import Problem, ProblemSourceError
from tests.tasks.problems.folders import evaluated

# Helpers of the prompt, tuples, dictionaries, a test that compares with itself.
SOME = ["HumanEval/0", "HumanEval/8", "HumanEval/32", "HumanEval/33", "HumanEval/38"]
SOME += ["HumanEval/95", "HumanEval/111"]


@pytest.fixture(scope="module")
def source() -> HumanEval:
    return HumanEval(ProblemsConfig(source="humaneval"))


def solved(task: Task) -> dict[str, str]:
    return {FILE: task.prompt + task.canonical_solution}


def outcomes(source: HumanEval, problem: Problem, task: Task) -> tuple[int, int]:
    right = evaluated(source, problem, solved(task))
    empty = evaluated(source, problem, {})
    assert (right.total, empty.total) == (1, 1)
    return right.passed, empty.passed


@pytest.mark.real
@pytest.mark.parametrize("name", SOME)
def test_a_right_function_passes_and_an_empty_workspace_does_not(
    source: HumanEval, name: str
) -> None:
    assert outcomes(source, source.load(name), tasks()[name]) == (1, 0)


@pytest.mark.real
def test_the_tests_are_out_of_the_functions_reach(source: HumanEval) -> None:
    name = "HumanEval/0"
    cheat = (
        "import builtins, sys, os\n"
        "class Any:\n"
        "    def __eq__(self, other): return True\n"
        "builtins.AssertionError = Exception\n"
        "def has_close_elements(*a): return Any()\n"
    )
    assert evaluated(source, source.load(name), {FILE: cheat}).passed == 0
    assert evaluated(source, source.load(name), {FILE: "import os; os._exit(0)"}).passed == 0


def test_all_problems_are_there_in_one_split_each(source: HumanEval) -> None:
    train, held_out = source.names(Split.TRAIN), source.names(Split.HELD_OUT)
    assert len(train) + len(held_out) == len(set(train) | set(held_out)) == 164
    assert 15 <= len(held_out) <= 55
    problem = source.load("HumanEval/0")
    assert "has_close_elements" in problem.instruction and FILE in problem.instruction
    assert "canonical" not in problem.instruction and "check(" not in problem.instruction


def test_an_unknown_problem_is_named(source: HumanEval) -> None:
    with pytest.raises(ProblemSourceError, match="HumanEval/999"):
        source.load("HumanEval/999")
