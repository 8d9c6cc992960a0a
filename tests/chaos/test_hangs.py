"""A run in which nothing moves any more ends by itself, and says what each part waited for."""

from __future__ import annotations

import pytest

from tests.flows.orchestrated import Orchestrated

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1200)]


def test_a_run_whose_engine_never_answers_ends_with_what_everybody_waits_for(
    orchestrated: Orchestrated,
) -> None:
    site = orchestrated
    site.hold.touch()
    try:
        train = site.train(
            "hangs",
            "training.steps=1",
            "cells.progress_limit_s=30",
            "rollout.limit_s=3600",
            "rollout.turn_limit_s=3600",
        )
        site.wait(train, "FAILED")
    finally:
        site.hold.unlink()
    message = site.flow_run(train)["state"]["message"]
    assert "nothing has moved for 30 s (cells.progress_limit_s)" in message, message
    for part in ("gateway: waits for a serving with ", "rollout: waits for 16 executions: s00000-"):
        assert part in message, message
    assert "groups to be sealed" in message, message
    site.until(lambda: site.left() == [], "its daemons end")
