"""A skipped test proves nothing, so a skip that is not expected fails the run.

Loaded by the ``conftest.py`` of the project.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

EXPECTED: dict[str, str] = {
    "needs a CUDA device": "no machine of the tests has a GPU; the paths that need one are marked "
    "in the documentation",
}
"""Reason that a skip gives, to why it may."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped:
        _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _refuse(report)
    return report


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip, or a failure that was expected, into a failure unless it is on the list."""
    reason = getattr(report, "wasxfail", None)
    if reason is None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
    if reason in EXPECTED:
        return
    report.outcome = "failed"
    report.longrepr = f"skipped, but its reason is not in tests/skips.py: {reason}"
    if hasattr(report, "wasxfail"):
        del report.wasxfail
