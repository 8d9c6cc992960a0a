"""GSPO against an independent reference in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.training import ObjectiveConfig
from tasks.training.objectives import UnknownObjectiveError, objective_path
from tasks.training.objectives.gspo import GSPO

logprobs = st.floats(-8, -0.001)
CONFIGS = [ObjectiveConfig(), ObjectiveConfig(clip_low=0.2, clip_high=0.3)]


def reference(policy, behaviour, advantage, config):
    """Value and gradient by hand, in Python's floats: no autograd, no clamp, no min."""
    count = len(policy)
    ratio = math.exp(math.fsum(p - b for p, b in zip(policy, behaviour, strict=True)) / count)
    above = advantage > 0 and ratio > 1 + config.clip_high
    below = advantage < 0 and ratio < 1 - config.clip_low
    if above or below:
        edge = 1 + config.clip_high if above else 1 - config.clip_low
        return -edge * advantage, [0.0] * count, ratio, 1.0
    return -ratio * advantage, [-advantage * ratio / count] * count, ratio, 0.0


@settings(max_examples=200)
@given(
    st.lists(st.tuples(logprobs, st.floats(-0.01, 0.01)), min_size=1, max_size=40),
    st.floats(-4, 4),
    st.sampled_from(CONFIGS),
)
def test_value_gradient_and_clip_equal_the_reference(tokens, advantage, config):
    policy = [logprob for logprob, _ in tokens]
    behaviour = [logprob - drift for logprob, drift in tokens]
    variable = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    loss, stats = GSPO(config)(variable, torch.tensor(behaviour, dtype=torch.float64), advantage)
    loss.backward()
    value, gradient, ratio, clipped = reference(policy, behaviour, advantage, config)
    assert loss.item() == pytest.approx(value, rel=1e-6, abs=1e-9)
    assert variable.grad.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-9)
    assert stats["ratio"] == pytest.approx(ratio, rel=1e-6)
    edges = (1 - config.clip_low, 1 + config.clip_high)
    if all(abs(ratio - edge) > 1e-9 for edge in edges) and abs(advantage) > 1e-9:
        assert stats["clipped"] == clipped


def test_on_policy_the_loss_is_the_negative_advantage_and_nothing_clips():
    values = torch.tensor([-1.0, -2.0, -0.5])
    loss, stats = GSPO(ObjectiveConfig())(values, values.clone(), 1.5)
    assert loss.item() == pytest.approx(-1.5)
    assert stats == {"ratio": 1.0, "clipped": 0.0}


def test_only_own_targets_enter():
    """Whatever stands where the mask is false, value and gradient stay bit for bit."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(50, generator=generator) < 0.4
    behaviour = -torch.rand(50, generator=generator)
    outcomes = []
    for filler in (0.0, -1e6, float("nan")):
        policy = (behaviour + 0.001).clone()
        recorded = behaviour.clone()
        policy[~mask] = filler
        recorded[~mask] = filler
        policy.requires_grad_()
        loss, _ = GSPO(ObjectiveConfig(clip_high=0.1))(policy[mask], recorded[mask], 1.0)
        loss.backward()
        outcomes.append((loss.item(), policy.grad[mask].tolist(), policy.grad[~mask].sum().item()))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][2] == 0.0


def test_objectives_are_found_by_name_or_path():
    assert objective_path("gspo") == "tasks.training.objectives.gspo:GSPO"
    assert objective_path("own.module:Loss") == "own.module:Loss"
    with pytest.raises(UnknownObjectiveError, match="give gspo, or an import path"):
        objective_path("gpso")
