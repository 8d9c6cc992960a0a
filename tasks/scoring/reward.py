"""The number that the tests of a workspace are worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from tasks.problems.source import EvaluatorError, Problem, TestReport
from tasks.scoring.importing import import_function

Reward = Callable[[Problem, TestReport, Path], float]


def make_reward(path: str | None) -> Reward:
    """The reward function at an import path ``module:function``; without one ``share_of_tests``.

    Raises:
        EvaluatorError: no such function.
    """
    if path is None:
        return share_of_tests
    own: Reward = import_function("problems.reward", path)
    return own


def share_of_tests(problem: Problem, tests: TestReport, workspace: Path) -> float:
    """The reward of a format that defines one; otherwise passed tests divided by all tests."""
    return tests.passed / tests.total if tests.reward is None else tests.reward


def reward_of(reward: Reward, problem: Problem, tests: TestReport, workspace: Path) -> float:
    """A finite number in [0, 1].

    Raises:
        EvaluatorError: the function failed, or gave something else. It is never clipped or
            replaced: a wrong reward must be seen.
    """
    name = getattr(reward, "__qualname__", repr(reward))
    try:
        value = float(reward(problem, tests, workspace))
    except Exception as error:
        raise EvaluatorError(f"reward function {name}: {type(error).__name__}: {error}") from error
    if not math.isfinite(value) or not 0 <= value <= 1:
        raise EvaluatorError(f"reward function {name}: {value!r} is not in [0, 1]")
    return value
