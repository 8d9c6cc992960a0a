"""The problem source ``nl2repo``."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from configs.problems import ProblemsConfig
from tasks.problems.command import run_command
from tasks.problems.folders import overlay, put, remove, remove_named, task_folders
from tasks.problems.listed import ListedSource
from tasks.problems.nl2repo.task import SPECIFICATION, Task, read_task
from tasks.problems.pytest_report import PytestReport, PytestResult
from tasks.problems.source import (
    BARE,
    Enclosure,
    EvaluationLimits,
    EvaluatorError,
    Problem,
    TestReport,
)

INSTRUCTION = (
    f"The file {SPECIFICATION} specifies a Python package. Read it, and write the whole package "
    f"into this folder, with everything that it needs to be imported and used from here."
)
INSIDE = "/workspace"

PACKAGING = (
    *("setup.py", "pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", "MANIFEST.in"),
    *("manifest.in", "requirements.txt", "requirements-dev.txt", "requirements-test.txt"),
    *("poetry.lock", "Pipfile", "Pipfile.lock", "environment.yml", "conda-env.yaml"),
)
"""The agent's packaging files, which the benchmark takes away before its tests run."""

PLANTED = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py"),
    *(".pytest.ini", "pytest.toml", ".pytest.toml", ".coveragerc"),
)
"""What else would steer pytest or Python itself. Only the true ones are there when tests run."""


class NL2Repo(ListedSource):
    """Task folders with ``start.md``, ``test_commands.json``, ``test_files.json`` and
    ``test_case_count.txt``, and the true tests in ``upstream/``. Ids are the folders' names.

    All folders are read at once, so that a fault in one is known before any work.

    Raises:
        ProblemSourceError: names folder, file and entry.
    """

    def __init__(self, config: ProblemsConfig) -> None:
        assert config.path is not None  # the settings' own check
        folders = task_folders(config.path, SPECIFICATION, "nl2repo")
        super().__init__(config, list(folders), f"nl2repo {config.path}")
        self._tasks = {
            name: read_task(folder)
            for name, folder in folders.items()
            if any(name in names for names in self._names.values())
        }

    def load(self, problem_id: str) -> Problem:
        """The problem of an id; its workspace holds the specification.

        Raises:
            ProblemSourceError: no such task.
        """
        split = self.split_of(problem_id)
        return Problem(
            problem_id=problem_id,
            split=split,
            instruction=INSTRUCTION,
            files={SPECIFICATION: self._tasks[problem_id].specification},
        )

    def evaluate(
        self,
        problem: Problem,
        workspace: Path,
        limits: EvaluationLimits,
        enclosure: Enclosure = BARE,
    ) -> TestReport:
        """Run the task's commands on the workspace with the true tests in it. Passed are tests of
        the true test files only, at most the task's count of them.

        Raises:
            EvaluatorError: pytest can't start, on the true files alone either.
        """
        task = self._tasks[problem.problem_id]
        removed = put_tests(task, workspace)
        result, log, timed_out = _run(task, workspace, limits, enclosure)
        if not result.started and not timed_out and not _works(task, workspace, limits, enclosure):
            raise EvaluatorError(f"{task.folder}: pytest does not start: {log[-1500:]}")
        root = INSIDE if enclosure.ends_all else str(workspace)
        true = tuple(f"{root}/{name}" for name in task.test_files)
        counted = [case for case in result.cases if _below(case.path, true)]
        passed = min(sum(case.passed for case in counted), task.count)
        lines = [f"{passed} of {task.count} passed; {len(counted)} ran"]
        lines += [f"left out: {', '.join(removed[:20])}"] * bool(removed)
        lines += [f"can't be collected: {', '.join(result.uncollected[:5])}"] * bool(
            result.uncollected
        )
        return TestReport(passed, task.count, "\n".join([*lines, log[-3000:]]), timed_out)


def put_tests(task: Task, workspace: Path) -> list[str]:
    """Take away what the agent may not bring and put the true files in; what was taken away."""
    removed = remove_named(workspace, [*PACKAGING, *PLANTED, "__pycache__"])
    # The image's other files are only there where the agent has none of that name.
    overlay(task.upstream, workspace)
    for name in task.test_files:
        put(task.upstream / name, workspace, name)
    return removed


def _run(
    task: Task, workspace: Path, limits: EvaluationLimits, enclosure: Enclosure
) -> tuple[PytestResult, str, bool]:
    with tempfile.TemporaryDirectory(prefix="gyre-report-") as folder:
        report = PytestReport(Path(folder).resolve())
        inside = INSIDE if enclosure.ends_all else None
        environment = {
            **report.environment(INSIDE if inside else str(workspace)),
            # Nothing can be fetched: an installation that would wait for it fails at once, as it
            # may; the package is imported from the workspace.
            "HOME": "/tmp",
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        script = "\n".join(_line(command) for command in task.commands)
        ended = run_command(
            [*enclosure.prefix(inside, report.mounts), "/bin/sh", "-c", script],
            cwd=workspace,
            environment=environment,
            limit_s=limits.seconds,
            ends_all=enclosure.ends_all,
        )
        return report.read(), ended.output, ended.exit_code is None


def _line(command: str | tuple[str, ...]) -> str:
    """Each command in a shell of its own, so that none changes the folder of the next."""
    parts = ("/bin/sh", "-c", command) if isinstance(command, str) else command
    return shlex.join(parts)


def _works(task: Task, workspace: Path, limits: EvaluationLimits, enclosure: Enclosure) -> bool:
    """Whether pytest starts on the true files alone: then it was the agent's files that kept it
    from starting."""
    for path in list(workspace.iterdir()):
        remove(path)
    put_tests(task, workspace)
    result, _, timed_out = _run(task, workspace, limits, enclosure)
    return bool(result.started) or timed_out


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
