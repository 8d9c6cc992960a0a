"""A reward function that tests can break and repair while a run goes on."""

from __future__ import annotations

import os
from pathlib import Path

from tasks.problems.source import Problem, TestReport

CALLS = "calls"
BROKEN = "broken"
"""Names, with spaces between, the calls that fail; they are counted from 0 in the file CALLS."""


def reward(problem: Problem, tests: TestReport, workspace: Path) -> float:
    """Alternately 0 and 1, so that groups have a spread whatever the policy can do."""
    folder = Path(os.environ["GYRE_TEST_EVALUATORS"])
    number = _count(folder / CALLS)
    broken = folder / BROKEN
    if broken.exists() and str(number) in broken.read_text().split():
        raise RuntimeError(f"call {number} was made to fail")
    return float(number % 2)


def calls(folder: Path) -> int:
    """How often the reward was asked for."""
    path = folder / CALLS
    return path.stat().st_size if path.exists() else 0


def _count(path: Path) -> int:
    """The number of this call; several threads may count at once."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, b".")
        return os.lseek(file, 0, os.SEEK_CUR) - 1
    finally:
        os.close(file)
