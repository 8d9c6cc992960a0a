"""The problem source ``harbor``."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

from configs.problems import ProblemsConfig
from tasks.problems.command import Ended, run_command
from tasks.problems.evaluation import Mounted
from tasks.problems.folders import remove, task_folders
from tasks.problems.harbor.environment import Place, make_place
from tasks.problems.harbor.task import CONFIG, Task, read_task
from tasks.problems.left_behind import read_regular
from tasks.problems.listed import ListedSource
from tasks.problems.source import (
    BARE,
    Enclosure,
    EvaluationLimits,
    EvaluatorError,
    Problem,
    ProblemSourceError,
    TestReport,
    furnish_files,
)

_REWARD_BYTES = 1 << 16


class Harbor(ListedSource):
    """Task folders with ``task.toml``, ``instruction.md``, ``environment/`` and ``tests/``; ids are
    their names. Tasks that a sandbox without images can't serve are refused.

    All folders are read at once, so that a fault in one is known before any work.

    Raises:
        ProblemSourceError: names folder, file and entry.
    """

    def __init__(self, config: ProblemsConfig) -> None:
        assert config.path is not None  # the settings' own check
        folders = task_folders(config.path, CONFIG, "harbor")
        super().__init__(config, list(folders), f"harbor {config.path}")
        chosen = {name for names in self._names.values() for name in names}
        self._tasks: dict[str, Task] = {}
        self._places: dict[str, Place] = {}
        faults: list[str] = []
        for name in sorted(chosen):
            try:
                self._tasks[name] = read_task(folders[name])
                self._places[name] = make_place(self._tasks[name])
            except ProblemSourceError as error:
                faults.append(str(error))
        if faults:
            more = f"\nand {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ProblemSourceError("\n".join(faults[:10]) + more)

    def longest_tests(self) -> tuple[str, float]:
        """The task whose tests may take longest, and how many seconds."""
        name = max(self._tasks, key=lambda one: self._tasks[one].config.verifier.timeout_sec)
        return name, self._tasks[name].config.verifier.timeout_sec

    def load(self, problem_id: str) -> Problem:
        """The problem of an id, with the files that its environment copies.

        Raises:
            ProblemSourceError: no such task.
        """
        split = self.split_of(problem_id)
        task, place = self._tasks[problem_id], self._places[problem_id]
        return Problem(
            problem_id=problem_id,
            split=split,
            instruction=task.instruction,
            files=place.files,
            executable=place.executable,
            workdir=place.workdir,
            limit_s=task.config.agent.timeout_sec,
        )

    def evaluate(
        self,
        problem: Problem,
        workspace: Path,
        limits: EvaluationLimits,
        enclosure: Enclosure = BARE,
    ) -> TestReport:
        """Run ``tests/test.sh``, which writes the reward into ``/logs/verifier``.

        Tests that write none although they do so on an untouched workspace, or after the task's
        own solution, give 0: otherwise an agent that breaks them, or does nothing, would be left
        out instead.

        Raises:
            EvaluatorError: the tests write no reward there either, as where a tool of theirs is
                missing.
        """
        task = self._tasks[problem.problem_id]
        seconds = min(limits.seconds, task.config.verifier.timeout_sec)
        reward, ended = self._run(problem, workspace, seconds, enclosure)
        timed_out = ended.exit_code is None
        silent = reward is None and not timed_out
        # No exit code says whose fault it is: the agent's code can end the tests with any.
        if silent and not self._works(problem, workspace, seconds, enclosure):
            raise EvaluatorError(
                f"{task.tests / 'test.sh'}: ended with {ended.exit_code} and wrote no reward; its "
                f"output ends: {ended.output[-1000:]}"
            )
        value = 0.0 if reward is None else reward
        log = f"reward {value:g}" if reward is not None else "no reward was written"
        log = f"{log}\n{ended.output[-3000:]}"
        return TestReport(int(value >= 1), 1, log, timed_out, reward=value)

    def _works(
        self, problem: Problem, workspace: Path, seconds: float, enclosure: Enclosure
    ) -> bool:
        """Whether the tests write a reward where no agent has been."""
        trials: list[Path | None] = [None]
        if (solution := self._tasks[problem.problem_id].solution) is not None:
            trials.append(solution)
        for trial in trials:
            for path in list(workspace.iterdir()):
                remove(path)
            furnish_files(problem, workspace)
            reward, ended = self._run(problem, workspace, seconds, enclosure, trial)
            if reward is not None or ended.exit_code is None:
                return True
        return False

    def _run(
        self,
        problem: Problem,
        workspace: Path,
        seconds: float,
        enclosure: Enclosure,
        solution: Path | None = None,
    ) -> tuple[float | None, Ended]:
        """The reward that the tests write; ``solution`` is carried out before them."""
        task, place = self._tasks[problem.problem_id], self._places[problem.problem_id]
        with tempfile.TemporaryDirectory(prefix="gyre-verifier-") as name:
            folder = Path(name).resolve()
            shutil.copytree(task.tests, folder / "tests")
            (folder / "logs" / "verifier").mkdir(parents=True)
            mounts = [
                Mounted(folder / "tests", "/tests"),
                Mounted(folder / "logs", "/logs", writable=True),
            ]
            program = "exec bash /tests/test.sh"
            if solution is not None:
                # One command, because each has a copy of the workspace of its own.
                program = f"bash /solution/solve.sh; {program}"
                mounts.append(Mounted(solution, "/solution"))
            environment = {
                "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
                "HOME": "/tmp",
                "LC_ALL": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
                **place.variables,
                **task.config.verifier.env,
            }
            ended = run_command(
                [*enclosure.prefix(place.workdir, mounts), "/bin/bash", "-c", program],
                cwd=workspace,
                environment=environment,
                limit_s=seconds,
                ends_all=enclosure.ends_all,
            )
            return read_reward(folder / "logs" / "verifier"), ended


def read_reward(folder: Path) -> float | None:
    """The reward in ``reward.json`` or ``reward.txt``; None without one in [0, 1].

    Of several named rewards that called ``reward`` counts, or the only one.
    """
    text = _text(folder / "reward.json")
    try:
        if text is not None:
            found = json.loads(text)
            if isinstance(found, dict):
                found = found.get("reward", next(iter(found.values())) if len(found) == 1 else None)
            value = float(found) if isinstance(found, int | float) else math.nan
        else:
            value = float(_text(folder / "reward.txt") or "nan")
    except (ValueError, RecursionError):
        return None
    return value if 0 <= value <= 1 else None


def _text(path: Path) -> str | None:
    data = read_regular(path, _REWARD_BYTES)
    return None if data is None else data.decode(errors="replace")
