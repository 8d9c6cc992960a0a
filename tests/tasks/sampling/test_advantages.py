"""Advantages over valid members only, and weights that give an execution one vote."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.training import Baseline, ExecutionMean, ObjectiveConfig
from tasks.sampling.advantages import group_advantages, trajectory_weights
from tasks.sampling.group import permuted

rewards = st.lists(
    st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=1, max_size=16
)


@given(rewards)
def test_population_statistics_over_valid_members(given_rewards):
    config = ObjectiveConfig()
    found = group_advantages(given_rewards, config)
    valid = [reward for reward in given_rewards if reward is not None]
    if len(set(valid)) < 2:
        assert found == (None,) * len(given_rewards)
        return
    mean, std = statistics.fmean(valid), statistics.pstdev(valid)
    for reward, advantage in zip(given_rewards, found, strict=True):
        if reward is None:
            assert advantage is None
        else:
            assert advantage == pytest.approx((reward - mean) / (std + config.epsilon))


@given(rewards, st.integers(0, 5))
def test_excluded_members_influence_nothing(given_rewards, extra):
    config = ObjectiveConfig()
    found = [a for a in group_advantages(given_rewards, config) if a is not None]
    more = [None] * extra + given_rewards
    assert [a for a in group_advantages(more, config) if a is not None] == found


def test_options():
    raw = ObjectiveConfig(normalise_std=False)
    assert group_advantages([1.0, 0.0, None], raw) == (0.5, -0.5, None)
    others = ObjectiveConfig(normalise_std=False, baseline=Baseline.LEAVE_ONE_OUT)
    assert group_advantages([1.0, 0.0, 0.5], others) == pytest.approx((0.75, -0.75, 0.0))


@given(rewards, st.booleans())
def test_leave_one_out_compares_with_the_other_valid_members(given_rewards, normalise):
    config = ObjectiveConfig(baseline=Baseline.LEAVE_ONE_OUT, normalise_std=normalise)
    valid = [reward for reward in given_rewards if reward is not None]
    if len(set(valid)) < 2:
        return
    scale = statistics.pstdev(valid) + config.epsilon if normalise else 1.0
    found = [a for a in group_advantages(given_rewards, config) if a is not None]
    for index, advantage in enumerate(found):
        others = statistics.fmean(valid[:index] + valid[index + 1 :])
        assert advantage == pytest.approx((valid[index] - others) / scale, abs=1e-12)


def test_fewer_than_two_valid_have_no_gradient():
    assert group_advantages([1.0, None], ObjectiveConfig()) == (None, None)


@given(st.lists(st.integers(1, 1000), max_size=9), st.sampled_from(ExecutionMean))
def test_weights_sum_to_one(counts, mean):
    weights = trajectory_weights(counts, mean)
    assert len(weights) == len(counts)
    if counts:
        assert sum(weights) == pytest.approx(1)


def test_means_differ_as_named():
    assert trajectory_weights([1, 3], ExecutionMean.TRAJECTORY) == (0.5, 0.5)
    assert trajectory_weights([1, 3], ExecutionMean.TOKEN) == (0.25, 0.75)


@given(st.lists(st.none() | st.floats(0, 1), max_size=12), st.text(max_size=8))
def test_permuted_rewards_are_the_same_rewards(rewards: list[float | None], seed: str) -> None:
    found = permuted(rewards, seed)
    assert [reward is None for reward in found] == [reward is None for reward in rewards]
    assert sorted(r for r in found if r is not None) == sorted(r for r in rewards if r is not None)
    assert found == permuted(rewards, seed)
