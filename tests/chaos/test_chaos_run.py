"""A run goes through whatever happens to it, and everything is done once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.warm_start.build import policy_key
from tests.chaos.chaos_run import run_chaos
from tests.flows.conftest import FinishedRun
from tests.flows.orchestrated import logs

pytestmark = pytest.mark.real

SHORT = ("training.steps=6", "evaluation.before=false", "evaluation.problems=16")


@pytest.mark.timeout(2400)
def test_a_few_minutes_of_faults(smoke_run: FinishedRun, tmp_path: Path) -> None:
    """From the policy that the smoke run has made. The run has two and a half minutes of work on a
    fast machine, and three or four times as much on others."""
    policy = smoke_run.run.store.local_path(policy_key(smoke_run.run.config))
    settings = (*SHORT, "model.source=hf_directory", f"model.path={policy}")
    report = run_chaos(tmp_path, minutes=6, every_s=40, seed=2, settings=settings, end_limit_s=900)
    assert not report.wrong, f"{report}\n{logs(tmp_path)}"
    assert report.exit_code == 0
    assert len(report.faults) >= 3


@pytest.mark.long
@pytest.mark.timeout(5 * 3600)
def test_three_quarters_of_an_hour_of_faults(tmp_path: Path) -> None:
    """A step takes half a minute, or several times that: there is work left after the last."""
    settings = ("training.steps=75", "evaluation.problems=32")
    report = run_chaos(
        tmp_path, minutes=45, every_s=90, seed=1, settings=settings, end_limit_s=2 * 3600
    )
    assert not report.wrong, f"{report}\n{logs(tmp_path)}"
    assert report.exit_code == 0
    assert len(report.faults) >= 15
