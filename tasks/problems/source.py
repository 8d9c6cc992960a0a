"""What a source of problems is, and how a run gets its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from configs.problems import ProblemsConfig
from storage.records import Split
from tasks.problems.evaluation import EvaluationLimits, EvaluatorError, TestReport

BUILT_IN = {"specrepo": "tasks.problems.specrepo.source:SpecRepo"}


class ProblemSourceError(ValueError):
    """A source that can't be had or an id that it does not know; the text says what to change."""


@dataclass(frozen=True)
class Problem:
    """A coding task as an execution sees it."""

    problem_id: str
    split: Split
    instruction: str
    """The first user message."""
    files: Mapping[str, str]
    """Workspace template: relative path to text."""
    tool_delay_s: float
    """Seconds that a slow tool adds to each command the agent runs; 0 for a fast one."""


@runtime_checkable
class ProblemSource(Protocol):
    """Problems by id. The same id always makes the same problem, in any process.

    An own source is a class with these methods; it is made as ``Class(config.problems)``.
    """

    def ids(self, split: Split, count: int, seed: int) -> list[str]:
        """``count`` ids of a split, fixed by ``seed``; a longer list begins with a shorter one."""
        ...

    def load(self, problem_id: str) -> Problem:
        """The problem of an id.

        Raises:
            ProblemSourceError: the source never made such an id.
        """
        ...

    def evaluate(
        self,
        problem: Problem,
        workspace: Path,
        limits: EvaluationLimits,
        command_prefix: Sequence[str] = (),
    ) -> TestReport:
        """Run the hidden tests on a workspace.

        Args:
            workspace: the frozen copy; may be changed by the tests.
            command_prefix: argv of a sandbox, in front of the command that runs the agent's code.
                Its working folder must be the workspace.

        Raises:
            EvaluatorError: our side failed. A hang or crash of the agent's code is a failed test.
        """
        ...


def make_source(config: ProblemsConfig) -> ProblemSource:
    """The source that ``config.source`` names: a built-in one or an import path module:Class.

    Raises:
        ProblemSourceError: no such module or class, or it is not a problem source.
    """
    path = BUILT_IN.get(config.source, config.source)
    module_name, separator, class_name = path.partition(":")
    if not separator or not module_name or not class_name:
        raise ProblemSourceError(
            f"problems.source {config.source!r}: give one of {', '.join(sorted(BUILT_IN))} or an "
            f"import path module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ProblemSourceError(
            f"problems.source {config.source!r}: {module_name} can't be imported: {error}"
        ) from error
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        raise ProblemSourceError(
            f"problems.source {config.source!r}: {module_name} has no class {class_name}"
        )
    lacking = [name for name in ("ids", "load", "evaluate") if not hasattr(kind, name)]
    if lacking:
        raise ProblemSourceError(
            f"problems.source {config.source!r}: {class_name} lacks {', '.join(lacking)}"
        )
    source: ProblemSource = kind(config)
    return source


__all__ = [
    "BUILT_IN",
    "EvaluationLimits",
    "EvaluatorError",
    "Problem",
    "ProblemSource",
    "ProblemSourceError",
    "TestReport",
    "make_source",
]
