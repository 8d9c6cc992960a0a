"""The pytest plugin that writes what tests found into a file of ours, a JSON object a line.

It is loaded by ``-p`` from a folder of its own, before any of the agent's files, and does nothing
where it is not asked to. Standard library and pytest only. The lines:
``{"start": true}``, ``{"test": "<path>::<name>", "passed": true}`` (the path is absolute),
``{"error": "<path>"}`` for a file that can't be collected, ``{"end": <exit status>}``.
"""

import json
import os
import sys
from pathlib import Path

import pytest

REPORT = "GYRE_REPORT"
"""Variable with the path of the report file."""
IMPORT_FROM = "GYRE_IMPORT_FROM"
"""Variable with the folder that the tests import the agent's code from; may be empty."""

# Taken out, so that a pytest that the tests start themselves writes no report.
_path = os.environ.pop(REPORT, "")
_import_from = os.environ.pop(IMPORT_FROM, "")
os.environ.pop("PYTEST_ADDOPTS", None)
_file = os.open(_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC) if _path else None


def _write(**line: object) -> None:
    if _file is not None:
        os.write(_file, json.dumps(line).encode() + b"\n")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Only now may the agent's files be found: pytest and its plugins are imported."""
    _write(start=True)
    os.environ.pop("PYTHONPATH", None)
    os.environ.pop("PYTHONSAFEPATH", None)
    if _import_from:
        sys.path.insert(0, _import_from)
        os.environ["PYTHONPATH"] = _import_from


class _Results:
    def __init__(self, root: Path) -> None:
        self._root = root

    def _absolute(self, name: str) -> str:
        path, separator, rest = name.partition("::")
        return str(self._root / path) + separator + rest

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            _write(error=self._absolute(report.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            # Expected to fail and passed all the same is no pass; nor is a skip.
            passed = report.passed and not hasattr(report, "wasxfail")
            _write(test=self._absolute(report.nodeid), passed=passed)
        elif report.when == "setup" and not report.passed:
            _write(test=self._absolute(report.nodeid), passed=False)


def pytest_configure(config: pytest.Config) -> None:
    if _file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Results(config.rootpath), "gyre-results")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not hasattr(session.config, "workerinput"):
        _write(end=int(exitstatus))
