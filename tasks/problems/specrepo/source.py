"""The built-in problem source."""

from __future__ import annotations

from pathlib import Path

from configs.problems import ProblemsConfig
from storage.records import Split
from tasks.problems.source import BARE, Enclosure, EvaluationLimits, Problem, TestReport
from tasks.problems.specrepo.light_tests import run_light
from tasks.problems.specrepo.pytest_tests import run_pytest
from tasks.problems.specrepo.specification import (
    ProblemName,
    Specification,
    make_specification,
    tool_delay_s,
)


class SpecRepo:
    """Specifications of small packages. An id holds all settings, so any process can load it."""

    def __init__(self, config: ProblemsConfig) -> None:
        self._config = config.specrepo

    def ids(self, split: Split, count: int, seed: int) -> list[str]:
        """The first ``count`` problems of a seed."""
        return [str(ProblemName.of(self._config, split, seed, number)) for number in range(count)]

    def load(self, problem_id: str) -> Problem:
        """The problem of an id; its workspace starts empty.

        Raises:
            ProblemSourceError: it is not an id of this source.
        """
        name = ProblemName.parse(problem_id)
        return Problem(
            problem_id=problem_id,
            split=name.split,
            instruction=make_specification(name).text,
            files={},
            tool_delay_s=tool_delay_s(name),
        )

    def specification(self, problem_id: str) -> Specification:
        """What the hidden tests of a problem are made from."""
        return make_specification(ProblemName.parse(problem_id))

    def evaluate(
        self,
        problem: Problem,
        workspace: Path,
        limits: EvaluationLimits,
        enclosure: Enclosure = BARE,
    ) -> TestReport:
        """One test a function. Packages with many functions are tested by pytest.

        Raises:
            EvaluatorError: our side failed.
        """
        specification = self.specification(problem.problem_id)
        small = len(specification.functions) <= self._config.pytest_above
        run = run_light if small else run_pytest
        return run(specification, workspace, limits, enclosure)
