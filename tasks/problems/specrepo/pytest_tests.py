"""Hidden tests under pytest, for packages that are large enough to pay its start-up.

The agent's code runs in the same separate process as under the light runner; pytest itself never
imports it, so no code under test can reach the reporting.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import orjson

from tasks.problems.command import run_command
from tasks.problems.evaluation import (
    BARE,
    Enclosure,
    EvaluationLimits,
    EvaluatorError,
    TestReport,
)
from tasks.problems.pytest_report import PytestReport
from tasks.problems.specrepo.specification import Specification
from tasks.problems.subject import OutOfTimeError

PYTEST_START_S = 30.0
"""Time for pytest's own start-up, on top of the limit of the tests."""

_PROJECT = Path(__file__).parents[3]

_CONFTEST = """\
import json
import sys
from pathlib import Path

import pytest

SETUP = json.loads(Path(__file__).with_name("setup.json").read_text())
sys.path.insert(0, SETUP["project"])

from tasks.problems.evaluation import Bare, EvaluationLimits, EvaluatorError
from tasks.problems.subject import OutOfTimeError, Subject


@pytest.fixture(scope="session")
def subject():
    limits = EvaluationLimits(**SETUP["limits"])
    with Subject(Path(SETUP["workspace"]), limits, Bare(*SETUP["enclosure"])) as subject:
        yield subject


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except (OutOfTimeError, EvaluatorError) as error:
        Path(__file__).with_name(type(error).__name__).write_text(str(error))
        raise
"""

_TEST = """\


def test_{name}(subject):
    values = subject.call({path!r}, {name!r}, {arguments})
    assert [repr(value) for value in values] == {expected}
"""


def run_pytest(
    specification: Specification,
    workspace: Path,
    limits: EvaluationLimits,
    enclosure: Enclosure = BARE,
) -> TestReport:
    """Test every function of a package.

    Raises:
        EvaluatorError: pytest did not end or left no report.
    """
    with tempfile.TemporaryDirectory(prefix="gyre-tests-") as folder:
        tests = Path(folder) / "tests"
        tests.mkdir()
        setup = {
            "workspace": str(workspace.resolve()),
            "limits": asdict(limits),
            "enclosure": [enclosure.prefix(), enclosure.ends_all],
            "project": str(_PROJECT),
        }
        (tests / "setup.json").write_bytes(orjson.dumps(setup))
        (tests / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
        (tests / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        for number, file in enumerate(specification.files):
            text = "".join(
                _TEST.format(
                    name=function.name,
                    path=file.path,
                    arguments=[[value] for value in function.operation.inputs],
                    expected=[
                        repr(value) for value in function.operation.expected(function.constant)
                    ],
                )
                for function in file.functions
            )
            (tests / f"test_{number:02d}.py").write_text(text, encoding="utf-8")
        report = PytestReport(Path(folder) / "report")
        limit_s = limits.seconds + PYTEST_START_S
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line"]
        environment = {**report.environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        ended = run_command(command, cwd=tests, environment=environment, limit_s=limit_s)
        if ended.exit_code is None:
            raise EvaluatorError(f"pytest did not end within {limit_s:g} s")
        return _report(tests, report, len(specification.functions), ended.output)


def _report(tests: Path, report: PytestReport, total: int, output: str) -> TestReport:
    ours = tests / EvaluatorError.__name__
    if ours.exists():
        raise EvaluatorError(ours.read_text(encoding="utf-8"))
    found = report.read()
    # Only our own tests ran in that process, so whatever is missing is our fault.
    if len(found.cases) != total or found.ended != 1:
        raise EvaluatorError(f"pytest ran {len(found.cases)} of {total} tests\n{output[-2000:]}")
    timed_out = (tests / OutOfTimeError.__name__).exists()
    passed = sum(case.passed for case in found.cases)
    return TestReport(passed, total, output[-4000:], timed_out)
