"""NL2RepoBench folders: passed tests of the true files over the count, and planted files gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.problems import ProblemsConfig
from storage.records import Split
from tasks.problems.nl2repo.source import NL2Repo
from tasks.problems.source import (
    EvaluationLimits,
    EvaluatorError,
    ProblemSourceError,
    furnish,
)
from tests.tasks.problems.folders import LIMITS, evaluated, evaluation_room, nl2repo_task

RIGHT = "def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(a, b): return a * b\n"


def source(folder: Path, **settings: object) -> NL2Repo:
    settings = {"source": "nl2repo", "path": str(folder), "held_out_share": 0, **settings}
    return NL2Repo(ProblemsConfig.model_validate(settings))


@pytest.mark.real
def test_rewards_are_passed_over_count(tmp_path: Path) -> None:
    nl2repo_task(tmp_path / "calc")
    found = source(tmp_path)
    problem = found.load("calc")
    assert set(problem.files) == {"start.md"} and problem.split is Split.TRAIN
    right = evaluated(found, problem, {"calc.py": RIGHT})
    assert (right.passed, right.total, right.timed_out) == (4, 4, False), right.log
    part = evaluated(found, problem, {"calc/__init__.py": "def add(a, b): return a + b\n"})
    assert (part.passed, part.total) == (2, 4), part.log
    none = evaluated(found, problem, {})  # the tests can't be collected, the other file can
    assert (none.passed, none.total) == (1, 4), none.log
    assert "can't be collected" in none.log


@pytest.mark.real
def test_more_passes_than_the_count_are_not_more_than_all(tmp_path: Path) -> None:
    nl2repo_task(tmp_path / "calc", **{"test_case_count.txt": "2"})
    found = source(tmp_path)
    report = evaluated(found, found.load("calc"), {"calc.py": RIGHT})
    assert (report.passed, report.total) == (2, 2)


PLANTED = {
    "conftest.py": "import os; os._exit(0)\n",
    "sitecustomize.py": "raise SystemExit(0)\n",
    "pytest.py": "print('4 passed'); raise SystemExit(0)\n",
    "json.py": "raise SystemExit(0)\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--co'\n",
    "tests/test_calc.py": "def test_one(): pass\n",
    "tests/conftest.py": "import os; os._exit(0)\n",
    "test_own.py": "\n".join(f"def test_{number}(): pass" for number in range(9)),
    "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
    "evil-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
    "evil.py": "import os; os._exit(0)\n",
}


@pytest.mark.real
def test_planted_files_change_nothing(tmp_path: Path) -> None:
    nl2repo_task(tmp_path / "calc")
    found = source(tmp_path)
    wrong = {"calc.py": "def add(a, b): return a + b\n", **PLANTED}
    report = evaluated(found, found.load("calc"), wrong)
    assert (report.passed, report.total) == (2, 4), report.log
    assert "pytest.ini" in report.log and "conftest.py" in report.log


FILLS_THE_DISK = """
def full(folder):
    try:
        for number in range(40):
            with open(f"{folder}/fill-{number}", "wb") as file:
                file.write(bytes(1 << 24))
    except OSError:
        return True
    return False
if all([full("."), full("/workspace/tests"), full("/tmp")]):
    def add(a, b): return a + b
    def sub(a, b): return a - b
    def mul(a, b): return a * b
"""


@pytest.mark.real
def test_the_disk_can_not_be_filled_by_an_evaluation(tmp_path: Path) -> None:
    """The functions are there only when every folder was full soon."""
    nl2repo_task(tmp_path / "calc")
    found = source(tmp_path)
    with evaluation_room() as room:
        workspace = room.room.workspace
        furnish(found.load("calc"), workspace)
        (workspace / "calc.py").write_text(FILLS_THE_DISK)
        report = found.evaluate(found.load("calc"), workspace, LIMITS, room)
        assert (report.passed, report.total) == (4, 4), report.log
        assert not list(workspace.rglob("fill-*"))


@pytest.mark.real
def test_tests_that_hang_are_a_score_of_those_before(tmp_path: Path) -> None:
    nl2repo_task(tmp_path / "calc")
    found = source(tmp_path)
    hang = RIGHT.replace("return a * b", "return sub(*[__import__('time').sleep(600)] * 2)")
    report = evaluated(
        found, found.load("calc"), {"calc.py": hang}, EvaluationLimits(seconds=30, memory_mb=2048)
    )
    assert report.timed_out and report.passed < 4


@pytest.mark.real
def test_a_pytest_that_can_not_start_is_our_failure(tmp_path: Path) -> None:
    nl2repo_task(tmp_path / "calc", **{"test_commands.json": '["/nowhere/pytest tests"]'})
    found = source(tmp_path)
    with pytest.raises(EvaluatorError, match="does not start"):
        evaluated(found, found.load("calc"), {"calc.py": RIGHT})


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("test_commands.json", "[", "not JSON"),
        ("test_commands.json", "[]", "at least one"),
        ("test_commands.json", '["make"]', "no command runs pytest"),
        ("test_commands.json", '["pytest", 3]', "entry 1"),
        ("test_files.json", '["../x"]', "entry 0"),
        ("test_files.json", '["nowhere"]', r"docker cp"),
        ("test_case_count.txt", "many", "must hold a number"),
        ("test_case_count.txt", "0", "must hold a number"),
    ],
)
def test_a_faulty_folder_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    nl2repo_task(tmp_path / "calc", **{file: text})
    with pytest.raises(ProblemSourceError, match=said) as caught:
        source(tmp_path)
    assert str(tmp_path / "calc") in str(caught.value)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemSourceError, match=r"no task for source nl2repo"):
        source(tmp_path)
    with pytest.raises(ProblemSourceError, match="no such folder"):
        source(tmp_path / "nowhere")
    (nl2repo_task(tmp_path / "calc") / "test_files.json").unlink()
    with pytest.raises(ProblemSourceError, match=r"calc/test_files\.json: can't be read"):
        source(tmp_path)
