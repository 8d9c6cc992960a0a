"""Task folders as the benchmarks lay them out, small."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from configs.problems import SandboxKind
from tasks.problems.evaluation import EvaluationLimits
from tasks.problems.source import Problem, ProblemSource, TestReport, furnish
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sandboxes.limits import Limits
from tasks.scoring.enclosure import RoomEnclosure

LIMITS = EvaluationLimits(seconds=120, memory_mb=2048)


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    """Make these files, by relative path."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def nl2repo_task(folder: Path, **changed: str) -> Path:
    """A package ``calc`` of three functions; the count is above the number of tests."""
    return write_tree(
        folder,
        {
            "start.md": "# calc\nPackage calc with add, sub and mul.\n",
            "test_commands.json": json.dumps(
                ["echo made > made.txt", "pytest --continue-on-collection-errors"]
            ),
            "test_files.json": json.dumps(["tests", "test_more.py"]),
            "test_case_count.txt": "4\n",
            "upstream/setup.py": "from setuptools import setup\nsetup(name='calc')\n",
            "upstream/tests/test_calc.py": (
                "import calc\n"
                "def test_add(): assert calc.add(1, 2) == 3\n"
                "def test_sub(): assert calc.sub(1, 2) == -1\n"
                "def test_mul(): assert calc.mul(2, 2) == 4\n"
            ),
            "upstream/test_more.py": "def test_made(): assert open('made.txt').read()\n",
            **changed,
        },
    )


def harbor_task(folder: Path, **changed: str) -> Path:
    """A task to write ``/app/answer.txt``; half the reward for a file with something else."""
    return write_tree(
        folder,
        {
            "task.toml": (
                'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\n'
                "timeout_sec = 60\n[agent]\ntimeout_sec = 120.0\n[environment]\n"
                'cpus = 1\nmemory = "2G"\nstorage = "10G"\nallow_internet = false\n'
            ),
            "instruction.md": "Write the sum of /app/numbers.txt into /app/answer.txt.",
            "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY numbers.txt ./\n",
            "environment/numbers.txt": "1\n2\n3\n",
            "tests/test.sh": (
                "#!/bin/bash\ncd /app\n"
                'if [ "$(cat answer.txt)" = 6 ]; then reward=1\n'
                "elif [ -f answer.txt ]; then reward=0.5\nelse reward=0; fi\n"
                "echo $reward > /logs/verifier/reward.txt\n"
            ),
            "solution/solve.sh": "echo 6 > /app/answer.txt\n",
            **changed,
        },
    )


@contextmanager
def evaluation_room() -> Iterator[RoomEnclosure]:
    """A real sandbox with a folder of its own."""
    folder = Path(tempfile.mkdtemp()).resolve()
    bounds = Limits(memory_mb=LIMITS.memory_mb, file_mb=256, cpu_s=int(LIMITS.seconds) + 1)
    try:
        sandbox = make_sandbox(SandboxKind.BUBBLEWRAP)
        with closing(RoomEnclosure(sandbox, folder, bounds)) as enclosure:
            yield enclosure
    finally:
        shutil.rmtree(folder)


def evaluated(
    source: ProblemSource,
    problem: Problem,
    files: dict[str, str],
    limits: EvaluationLimits = LIMITS,
) -> TestReport:
    """What the tests say of a workspace in which an agent wrote these files."""
    with evaluation_room() as room:
        furnish(problem, room.room.workspace)
        write_tree(room.room.workspace, files)
        return source.evaluate(problem, room.room.workspace, limits, room)
