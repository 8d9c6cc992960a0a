"""Evaluators of one's own, in place of the tests that a problem's source brings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tasks.problems.source import Enclosure, EvaluationLimits, Problem, TestReport
from tasks.scoring.importing import import_function

Evaluator = Callable[[Problem, Path, EvaluationLimits, Enclosure], TestReport]
"""What ``ProblemSource.evaluate`` is. Whatever it raises is a failure of our side: the execution is
evaluated again, and left out of training when that does not help."""


def make_evaluator(path: str) -> Evaluator:
    """The evaluator at an import path ``module:function``.

    Raises:
        EvaluatorError: no such function.
    """
    own: Evaluator = import_function("problems.evaluator", path)
    return own
