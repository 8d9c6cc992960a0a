"""`gyre fsck` and `gyre replay` on a whole real run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.fsck.check import check_run
from tests.flows.conftest import FinishedRun

pytestmark = [pytest.mark.real, pytest.mark.timeout(1000)]


def replayed(run: FinishedRun) -> dict[str, Any]:
    arguments = ["replay", run.run.run_id, "--root", run.run.store.url, "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_nothing_is_wrong_with_what_it_has_stored(smoke_run: FinishedRun) -> None:
    assert check_run(smoke_run.run) == ()


def test_sealed_samples_give_the_weights_of_the_run_again(smoke_run: FinishedRun) -> None:
    """Twice the same bits; those of the run but for the order in which satellites were added."""
    first, second = replayed(smoke_run), replayed(smoke_run)
    training = smoke_run.run.config.training
    assert first["updates"] <= training.steps * training.updates_per_step
    assert first["updates"] > 0 and first["micro_steps"] >= first["updates"]
    assert first["difference"]["share"] <= 1e-3
    assert first == second, "its digest is that of the weights' bits"
