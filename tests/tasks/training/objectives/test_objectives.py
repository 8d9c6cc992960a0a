"""Every objective against its paper's formulas in double precision: value, gradient, statistics."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.replica.errors import ReplicaError
from cells.replica.objective import Targets
from configs.training import ObjectiveConfig
from tasks.training.objectives import UnknownObjectiveError, objective_path
from tests.tasks.training.objectives import references

CLOSE = {"rel": 1e-6, "abs": 1e-9}
PUBLISHED = {
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
}
FORMULAS = {
    "gspo": references.gspo,
    "gspo_token": references.gspo_token,
    "grpo": references.grpo,
    "dapo": references.grpo,
}
ALL = [*PUBLISHED, "tis"]


def made(name, **more):
    module, _, kind = objective_path(name).partition(":")
    return getattr(import_module(module), kind)(ObjectiveConfig(name=name, **more))


@st.composite
def samples(draw, drift=0.5):
    """Log-probs of one sequence under four policies, and its advantage; drifts of both sizes, so
    that the narrow clips are met inside and outside."""
    count = draw(st.integers(1, 30))
    away = draw(st.sampled_from([drift, 3e-4]))
    drifts = st.lists(st.floats(-away, away), min_size=count, max_size=count)
    policy = draw(st.lists(st.floats(-8, -0.6), min_size=count, max_size=count))
    others = [[p - d for p, d in zip(policy, draw(drifts), strict=True)] for _ in range(3)]
    return policy, *others, draw(st.floats(-4, 4))


def targets(policy, behaviour, proximal, reference, advantage):
    double = torch.float64
    return Targets(
        torch.tensor(policy, dtype=double, requires_grad=True),
        torch.tensor(behaviour, dtype=double),
        advantage,
        proximal=torch.tensor(proximal, dtype=double),
        reference=torch.tensor(reference, dtype=double),
    )


def outcome(objective, given_targets):
    loss, stats = objective(given_targets)
    loss.backward()
    return loss.item(), given_targets.policy.grad.tolist(), stats


def expected(policy, formula):
    """Value and gradient of minus what a formula gives for the targets' log-probs."""
    new = [torch.tensor(p, dtype=torch.float64, requires_grad=True) for p in policy]
    loss = -formula(new)
    if loss.requires_grad:
        loss.backward()
    return loss.item(), [0.0 if p.grad is None else p.grad.item() for p in new]


@pytest.mark.parametrize("name", list(PUBLISHED))
@settings(max_examples=40, deadline=None)
@given(samples(), st.sampled_from(["behaviour", "proximal"]))
def test_clipped_objectives_equal_their_formulas(name, sample, ratio):
    policy, behaviour, proximal, _, advantage = sample
    old = proximal if ratio == "proximal" else behaviour
    value, gradient, _ = outcome(made(name, ratio=ratio), targets(*sample))
    wanted = expected(policy, lambda new: FORMULAS[name](new, old, advantage, *PUBLISHED[name]))
    assert value == pytest.approx(wanted[0], **CLOSE)
    assert gradient == pytest.approx(wanted[1], **CLOSE)


@settings(max_examples=40, deadline=None)
@given(samples(), st.floats(0, 0.5), st.floats(0, 3), st.sampled_from(list(PUBLISHED)))
def test_a_clip_of_ones_own_is_taken(sample, low, high, name):
    policy, behaviour, _, _, advantage = sample
    value, gradient, _ = outcome(made(name, clip_low=low, clip_high=high), targets(*sample))
    wanted = expected(policy, lambda new: FORMULAS[name](new, behaviour, advantage, low, high))
    assert value == pytest.approx(wanted[0], **CLOSE)
    assert gradient == pytest.approx(wanted[1], **CLOSE)


@settings(max_examples=50, deadline=None)
@given(samples(drift=2.0), st.floats(0.5, 3))
def test_truncated_importance_equals_its_formula(sample, cap):
    policy, behaviour, _, _, advantage = sample
    value, gradient, stats = outcome(made("tis", importance_cap=cap), targets(*sample))
    wanted, wanted_value = references.tis_gradient(policy, behaviour, advantage, cap)
    assert gradient == pytest.approx(wanted, **CLOSE)
    assert value == pytest.approx(wanted_value, **CLOSE)
    beyond = [math.exp(p - q) > cap for p, q in zip(policy, behaviour, strict=True)]
    assert stats["clipped"] == pytest.approx(sum(beyond) / len(beyond), abs=1.01 / len(beyond))


@settings(max_examples=50, deadline=None)
@given(samples(), st.floats(0.5, 2))
def test_the_way_from_behaviour_to_proximal_weighs_targets(sample, cap):
    policy, behaviour, proximal, _, advantage = sample
    objective = made("grpo", ratio="proximal", importance_cap=cap)
    value, gradient, _ = outcome(objective, targets(*sample))
    weights = [min(math.exp(p - b), cap) for p, b in zip(proximal, behaviour, strict=True)]
    wanted = expected(
        policy, lambda new: references.grpo(new, proximal, advantage, 0.2, 0.2, weights)
    )
    assert value == pytest.approx(wanted[0], **CLOSE)
    assert gradient == pytest.approx(wanted[1], **CLOSE)


@settings(max_examples=50, deadline=None)
@given(samples(), st.floats(0.5, 2))
def test_the_weight_of_a_sequence_is_of_its_mean(sample, cap):
    policy, behaviour, proximal, _, advantage = sample
    objective = made("gspo", ratio="proximal", importance_cap=cap)
    value, gradient, _ = outcome(objective, targets(*sample))
    way = math.fsum(p - b for p, b in zip(proximal, behaviour, strict=True)) / len(policy)
    weight = min(math.exp(way), cap)
    wanted = expected(
        policy,
        lambda new: weight * references.gspo(new, proximal, advantage, *PUBLISHED["gspo"]),
    )
    assert value == pytest.approx(wanted[0], **CLOSE)
    assert gradient == pytest.approx(wanted[1], **CLOSE)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(samples(), st.floats(1e-3, 10))
def test_kl_is_added_to_every_objective(name, sample, weight):
    policy, _, _, reference, _ = sample
    without = outcome(made(name), targets(*sample))
    value, gradient, stats = outcome(made(name, kl=weight), targets(*sample))
    term, slope = expected(policy, lambda new: -references.k3(new, reference))
    assert value - without[0] == pytest.approx(weight * term, rel=1e-6, abs=1e-8)
    steeper = [full - bare for full, bare in zip(gradient, without[1], strict=True)]
    assert steeper == pytest.approx([weight * one for one in slope], rel=1e-6, abs=1e-8)
    assert stats["kl"] == pytest.approx(term, **CLOSE)
    assert "kl" not in without[2]


@pytest.mark.parametrize("name", ALL)
def test_on_policy_the_loss_is_the_negative_advantage_and_nothing_clips(name):
    values = [-1.0, -2.0, -0.5]
    value, gradient, stats = outcome(made(name), targets(values, values, values, values, 1.5))
    assert value == pytest.approx(-1.5)
    assert gradient == pytest.approx([-0.5] * 3)
    assert stats["ratio"] == 1.0
    assert not any(share for name, share in stats.items() if name.startswith("clipped"))


@pytest.mark.parametrize(
    ("advantage", "moved", "end"), [(1.0, 0.5, "high"), (-1.0, -0.5, "low"), (1.0, -0.5, None)]
)
def test_clips_are_counted_at_their_end(advantage, moved, end):
    """Of two targets one has moved; on the side where the advantage wants it the clip holds it."""
    _, gradient, stats = outcome(
        made("grpo"), targets([-2.0 + moved, -1.0], [-2.0, -1.0], [], [], advantage)
    )
    share = 0.5 if end else 0.0
    assert stats["clipped"] == share
    assert stats["clipped_low"] == (share if end == "low" else 0.0)
    assert stats["clipped_high"] == (share if end == "high" else 0.0)
    assert (gradient[0] == 0.0) is (end is not None)
    assert gradient[1] == pytest.approx(-advantage / 2)


@pytest.mark.parametrize("name", ALL)
def test_only_own_targets_enter(name):
    """Whatever stands where the mask is false, value and gradient stay bit for bit."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(50, generator=generator) < 0.4
    behaviour = -torch.rand(50, generator=generator)
    outcomes = []
    for filler in (0.0, -1e6, float("nan")):
        policy, recorded = behaviour + 0.001, behaviour.clone()
        policy[~mask] = filler
        recorded[~mask] = filler
        policy.requires_grad_()
        loss, _ = made(name)(Targets(policy[mask], recorded[mask], -1.0))
        loss.backward()
        outcomes.append((loss.item(), policy.grad[mask].tolist(), policy.grad[~mask].sum().item()))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][2] == 0.0


@pytest.mark.parametrize(
    ("settings_", "missing"), [({"ratio": "proximal"}, "proximal"), ({"kl": 0.1}, "reference")]
)
def test_a_policy_that_is_not_named_is_asked_for(settings_, missing):
    values = torch.tensor([-1.0])
    with pytest.raises(ReplicaError, match=f"needs the {missing} policy"):
        made("grpo", **settings_)(Targets(values, values, 1.0))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"importance_cap": 2.0}, "set ratio=proximal with it"),
        ({"name": "tis", "ratio": "proximal"}, "no use for ratio=proximal"),
        ({"name": "tis", "clip_high": 0.2}, "tis does not clip"),
        ({"name": "tis", "clip_low": 0.2}, "tis does not clip"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        ObjectiveConfig(**options)
    assert ObjectiveConfig(name="own.module:Loss", importance_cap=2.0, ratio="proximal")


def test_objectives_are_found_by_name_or_path():
    for name in ALL:
        assert made(name)
    assert objective_path("own.module:Loss") == "own.module:Loss"
    with pytest.raises(UnknownObjectiveError, match="give dapo, grpo, gspo, gspo_token, tis, or"):
        objective_path("gpso")
