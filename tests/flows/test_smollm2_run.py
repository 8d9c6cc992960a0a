"""SmolLM2-135M, warm-started, through the whole stack: RL steps on HumanEval on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.history import evaluations_of, updates_of
from storage.run import open_run
from tests.flows.conftest import finish, start_gyre
from tests.flows.orchestrated import logs, marked_processes
from tests.smollm import make_fitted_smollm


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(3600)
def test_steps_on_humaneval_have_a_gradient_and_no_gap(tmp_path: Path) -> None:
    """The preset as it is; its policy was fitted to tool calls, with mistakes."""
    policy = make_fitted_smollm()
    command = start_gyre(
        *(tmp_path, "train", "--config", "smollm2", "--name", "smollm2"),
        *("--set", f"model.path={policy}"),
    )
    output = finish(command, tmp_path)
    assert command.returncode == 0, f"{output[-6000:]}\n{logs(tmp_path)}"
    assert marked_processes(tmp_path) == []
    run = open_run(str(tmp_path), "smollm2")
    updates = updates_of(run)
    told = [
        {
            "grad_norm": one.grad_norm,
            "logprob_gap_max": one.logprob_gap_max,
            "pass_rate": one.pass_rate,
            "targets": one.target_tokens,
            "rollout_s": round(one.rollout_s, 1),
            "train_s": round(one.train_s, 1),
        }
        for one in updates
    ]
    held_out = {version: found.pass_rate for version, found in evaluations_of(run).items()}
    print(json.dumps({"updates": told, "held_out": held_out}))
    assert len(updates) == run.config.training.steps
    assert all(one.logprob_gap_max < 1e-3 for one in updates)
    assert all(one.valid == 12 and not one.excluded for one in updates)
    assert any(one.grad_norm for one in updates), "some group had passes and failures"
    assert sum(one.target_tokens for one in updates) > 0
