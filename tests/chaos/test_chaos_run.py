"""A run goes through whatever happens to it, and everything is done once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.chaos_run import run_chaos
from tests.flows.orchestrated import logs

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(3 * 3600)]


@pytest.mark.parametrize(("minutes", "every_s"), [(8, 60), (45, 90)])
def test_a_run_to_which_something_happens_all_the_time(
    tmp_path: Path, minutes: float, every_s: float
) -> None:
    report = run_chaos(tmp_path, minutes=minutes, every_s=every_s, seed=1)
    assert not report.wrong, f"{report}\n{logs(tmp_path)}"
    assert report.exit_code == 0
    assert len(report.faults) >= 0.5 * 60 * minutes / every_s
