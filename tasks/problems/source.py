"""What a source of problems is, and how a run gets its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

from configs.problems import MIXTURE, ProblemsConfig
from storage.records import Split
from tasks.problems.evaluation import (
    BARE,
    Enclosure,
    EvaluationLimits,
    EvaluatorError,
    TestReport,
)

BUILT_IN = {
    "specrepo": "tasks.problems.specrepo.source:SpecRepo",
    "humaneval": "tasks.problems.humaneval:HumanEval",
    "harbor": "tasks.problems.harbor.source:Harbor",
    "nl2repo": "tasks.problems.nl2repo.source:NL2Repo",
    MIXTURE: "tasks.problems.mixture:Mixture",
}


class ProblemSourceError(ValueError):
    """A source that can't be had or an id that it does not know; the text says what to change."""


@dataclass(frozen=True)
class Problem:
    """A coding task as an execution sees it."""

    problem_id: str
    split: Split
    instruction: str
    """The first user message."""
    files: Mapping[str, str | bytes]
    """Workspace template: relative path to content."""
    tool_delay_s: float = 0.0
    """Seconds that a slow tool adds to each command the agent runs; 0 for a fast one."""
    executable: frozenset[str] = frozenset()
    """Those of ``files`` that may be executed."""
    workdir: str | None = None
    """Absolute path at which the workspace has to be seen; None where it does not matter."""
    limit_s: float | None = None
    """The task's own time limit of an execution; rollout.limit_s stays the longest."""


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
        enclosure: Enclosure = BARE,
    ) -> TestReport:
        """Run the hidden tests on a workspace.

        Args:
            workspace: the frozen copy; may be changed by the tests.
            enclosure: the sandbox of every command that runs the agent's code.

        Raises:
            EvaluatorError: our side failed. A hang or crash of the agent's code is a failed test.
        """
        ...


@runtime_checkable
class SteppedSource(Protocol):
    """A source that decides itself which problems a step trains on, so that none comes again
    before all others came. Others give the first ids of a seed of the step."""

    def step_ids(self, step: int, count: int, seed: int) -> list[str]:
        """The problems of ``step`` when every step takes ``count``; fixed by the arguments."""
        ...


def step_problems(source: ProblemSource, step: int, count: int, seed: int) -> list[str]:
    """Ids of the problems that a step trains on; fixed by the arguments.

    Args:
        seed: of the run.

    Raises:
        ProblemSourceError: nothing may be trained on.
    """
    if isinstance(source, SteppedSource):
        return source.step_ids(step, count, seed)
    return source.ids(Split.TRAIN, count, step_seed(seed, step))


def step_seed(seed: int, step: int) -> int:
    """Seed of a step's problems."""
    digest = blake2b(f"{seed}/step {step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def furnish(problem: Problem, workspace: Path) -> None:
    """Make the workspace that an execution starts in.

    Raises:
        ProblemSourceError: a file of the problem lies outside.
    """
    workspace.mkdir(parents=True, mode=0o700)
    furnish_files(problem, workspace)


def furnish_files(problem: Problem, workspace: Path) -> None:
    """Write a problem's files into a folder that is there.

    Raises:
        ProblemSourceError: a file of the problem lies outside.
    """
    for name, content in problem.files.items():
        path = workspace / name
        if Path(name).is_absolute() or ".." in path.parts:
            raise ProblemSourceError(
                f"{problem.problem_id}: file {name!r} lies outside of the workspace"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        if name in problem.executable:
            path.chmod(0o755)


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
    "BARE",
    "BUILT_IN",
    "Enclosure",
    "EvaluationLimits",
    "EvaluatorError",
    "Problem",
    "ProblemSource",
    "ProblemSourceError",
    "SteppedSource",
    "TestReport",
    "furnish",
    "furnish_files",
    "make_source",
    "step_problems",
    "step_seed",
]
