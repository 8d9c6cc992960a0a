"""Many sessions at one gateway at once: no call fails, all are recorded, memory stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.sessions import Load, measure

GROWTH = 0.05
"""Of the gateway's memory, over the last two thirds of ten minutes."""


def test_sixty_sessions_for_some_seconds(tmp_path: Path) -> None:
    """Too short to say anything of memory: each session has ended one conversation or two."""
    seen = measure(Load(sessions=60, seconds=6, think_s=0.5, turns=4), tmp_path)
    assert seen["errors"] == 0, seen["first_errors"]
    assert not seen["gateway_errors"]
    assert seen["executions_closed"] >= 60 and seen["calls"] > seen["executions_closed"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_thousand_sessions_for_ten_minutes(tmp_path: Path) -> None:
    seen = measure(Load(sessions=2000, seconds=600, think_s=20, turns=10), tmp_path)
    print(json.dumps(seen))
    assert seen["errors"] == 0, seen["first_errors"]
    assert not seen["gateway_errors"]
    # Between two executions a session has none.
    assert seen["open_at_once"] > 0.9 * 2000
    assert abs(seen["growth_of_settled"]) < GROWTH, seen["memory_mb"]
