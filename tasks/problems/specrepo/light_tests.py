"""Hidden tests without a test framework, whose start-up would cost more than the tests."""

from __future__ import annotations

from pathlib import Path

from tasks.problems.evaluation import BARE, Enclosure, EvaluationLimits, TestReport
from tasks.problems.specrepo.specification import Function, Specification
from tasks.problems.subject import OutOfTimeError, Subject, SubjectError


class WrongValueError(Exception):
    """A function returned something else than it should."""


def check(subject: Subject, path: str, function: Function) -> None:
    """The hidden test of one function: every value right, and of the right type.

    Raises:
        WrongValueError, SubjectError: the test fails.
    """
    inputs = function.operation.inputs
    values = subject.call(path, function.name, [[value] for value in inputs])
    for given, value, right in zip(
        inputs, values, function.operation.expected(function.constant), strict=True
    ):
        # As text, because 1 == 1.0 == True.
        if repr(value) != repr(right):
            raise WrongValueError(f"{given} gives {repr(value)[:60]}")


def run_light(
    specification: Specification,
    workspace: Path,
    limits: EvaluationLimits,
    enclosure: Enclosure = BARE,
) -> TestReport:
    """Test every function of a package.

    Raises:
        EvaluatorError: our side failed.
    """
    lines: list[str] = []
    passed = 0
    timed_out = False
    with Subject(workspace, limits, enclosure) as subject:
        for file in specification.files:
            for function in file.functions:
                try:
                    check(subject, file.path, function)
                    outcome = "passed"
                    passed += 1
                except OutOfTimeError as error:
                    outcome = f"failed: {error}"
                    timed_out = True
                except (SubjectError, WrongValueError, ValueError) as error:
                    outcome = f"failed: {error}"
                lines.append(f"{file.path}::{function.name} {outcome}")
    return TestReport(passed, len(specification.functions), "\n".join(lines), timed_out)
