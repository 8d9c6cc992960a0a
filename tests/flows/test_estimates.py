"""Estimates against exact enumeration and independent formulas."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from flows.estimates import estimate, paired_gain, pass_at_k, shown_ks

_REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7)


@given(rewards=_REWARDS, k=st.integers(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_solution(rewards: list[float], k: int) -> None:
    found = pass_at_k({"p": rewards}, k)
    if k > len(rewards):
        assert found is None
        return
    subsets = list(combinations(rewards, k))
    assert found is not None
    assert found.mean == pytest.approx(fmean(1.0 in subset for subset in subsets))


def test_pass_at_k_is_a_mean_over_the_problems_that_can_say_something() -> None:
    rewards = {"easy": [1.0, 1.0], "hard": [0.0, 0.9], "half": [1.0, 0.0], "lost": [1.0]}
    found = pass_at_k(rewards, 2)
    assert found is not None
    assert (found.count, found.mean) == (3, pytest.approx(2 / 3))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_the_interval_is_that_of_a_t_test(values: list[float]) -> None:
    found = estimate(values)
    if found.standard_error < 1e-9:
        return
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert found.interval == pytest.approx((low, high))


def test_the_gain_is_paired_over_shared_problems() -> None:
    before = {"a": 0.0, "b": 0.8, "only": 1.0}
    after = {"a": 0.2, "b": 1.0, "new": 0.0}
    gain = paired_gain(before, after)
    assert gain is not None
    # Both gain the same, however different the problems are: nothing is uncertain.
    assert (gain.mean, gain.count) == (pytest.approx(0.2), 2)
    assert gain.standard_error == pytest.approx(0.0)
    assert paired_gain({"a": 1.0}, {"b": 1.0}) is None


def test_a_single_value_has_no_interval() -> None:
    assert estimate([0.3]).interval == (0.3, 0.3)
    with pytest.raises(ValueError, match="needs a value"):
        estimate([])


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))]
)
def test_ks_that_are_shown(samples: int, ks: tuple[int, ...]) -> None:
    assert shown_ks(samples) == ks
