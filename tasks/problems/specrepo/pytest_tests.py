"""Hidden tests under pytest, for packages that are large enough to pay its start-up.

The agent's code runs in the same separate process as under the light runner; pytest itself never
imports it, so no code under test can reach the reporting.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import orjson

from tasks.problems.evaluation import EvaluationLimits, EvaluatorError, TestReport
from tasks.problems.specrepo.specification import Specification
from tasks.problems.subject import OutOfTimeError

PYTEST_START_S = 30.0
"""Time for pytest's own start-up, on top of the limit of the tests."""

_PROJECT = Path(__file__).parents[3]

_CONFTEST = """\
import json
from pathlib import Path

import pytest

from tasks.problems.evaluation import EvaluationLimits, EvaluatorError
from tasks.problems.subject import OutOfTimeError, Subject

SETUP = json.loads(Path(__file__).with_name("setup.json").read_text())


@pytest.fixture(scope="session")
def subject():
    limits = EvaluationLimits(**SETUP["limits"])
    with Subject(Path(SETUP["workspace"]), limits, SETUP["command_prefix"]) as subject:
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
    assert [json.dumps(value) for value in values] == {expected}
"""


def run_pytest(
    specification: Specification,
    workspace: Path,
    limits: EvaluationLimits,
    command_prefix: Sequence[str] = (),
) -> TestReport:
    """Test every function of a package.

    Raises:
        EvaluatorError: pytest did not end or left no report.
    """
    with tempfile.TemporaryDirectory(prefix="gyre-tests-") as folder:
        tests = Path(folder)
        setup = {
            "workspace": str(workspace.resolve()),
            "limits": asdict(limits),
            "command_prefix": list(command_prefix),
        }
        (tests / "setup.json").write_bytes(orjson.dumps(setup))
        (tests / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
        (tests / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        for number, file in enumerate(specification.files):
            text = "import json\n" + "".join(
                _TEST.format(
                    name=function.name,
                    path=file.path,
                    arguments=[[value] for value in function.operation.inputs],
                    expected=[
                        orjson.dumps(value).decode().replace(",", ", ")
                        for value in function.operation.expected(function.constant)
                    ],
                )
                for function in file.functions
            )
            (tests / f"test_{number:02d}.py").write_text(text, encoding="utf-8")
        output = _run(tests, limits.seconds + PYTEST_START_S)
        return _report(tests, len(specification.functions), output)


def _run(tests: Path, limit_s: float) -> str:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"),
            *("--junitxml=report.xml", "-o", "junit_family=xunit1"),
        ],
        cwd=tests,
        env={
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": str(_PROJECT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "LC_ALL": "C.UTF-8",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise EvaluatorError(f"pytest did not end within {limit_s:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return output.decode(errors="replace")


def _report(tests: Path, total: int, output: str) -> TestReport:
    try:
        # Written by our pytest process into our folder, not by the agent's code.
        cases = list(ElementTree.parse(tests / "report.xml").iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise EvaluatorError(f"pytest left no report: {error}\n{output[-2000:]}") from error
    if len(cases) != total or any(case.find("error") is not None for case in cases):
        raise EvaluatorError(f"pytest ran {len(cases)} of {total} tests\n{output[-2000:]}")
    ours = tests / EvaluatorError.__name__
    if ours.exists():
        raise EvaluatorError(ours.read_text(encoding="utf-8"))
    passed = sum(case.find("failure") is None for case in cases)
    timed_out = (tests / OutOfTimeError.__name__).exists()
    return TestReport(passed, total, output[-4000:], timed_out)
