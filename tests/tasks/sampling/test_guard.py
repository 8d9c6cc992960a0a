"""The guard lets an update keep few exclusions, and stops a step before too many are sealed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.sampling.guard import ExclusionGuard, TooManyExcludedError


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.floats(0, 1),
    st.lists(st.integers(0, 4), max_size=16),
)
def test_what_is_admitted_never_exceeds_the_share(
    shares: list[int], share: float, groups: list[int]
) -> None:
    guard = ExclusionGuard(shares, 4, share)
    admitted = [0] * len(shares)
    taken = 0
    for excluded in groups:
        update = next(
            (i for i in range(len(shares)) if taken < sum(shares[: i + 1])), len(shares) - 1
        )
        try:
            guard.admit("q", excluded)
        except TooManyExcludedError:
            assert admitted[update] + excluded > share * shares[update] * 4
        else:
            admitted[update] += excluded
            taken += 1
    assert all(
        found <= share * planned * 4 for found, planned in zip(admitted, shares, strict=True)
    )


def test_a_refused_group_leaves_room_for_its_repair() -> None:
    guard = ExclusionGuard([1], 4, 0.25)
    with pytest.raises(TooManyExcludedError, match=r"scoring\.max_excluded_share"):
        guard.admit("q", 2)
    guard.admit("q", 0)


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(0, 4))
def test_a_later_attempt_counts_what_was_sealed_where_it_was_counted_before(
    groups: list[int], kept: int
) -> None:
    first, later = (ExclusionGuard([2, 2], 4, 0.5) for _ in range(2))
    outcomes = []
    for guard in (first, later):
        found = []
        for number, excluded in enumerate(groups):
            if guard is later and number < kept:
                if outcomes[0][number]:
                    later.count(excluded)
                continue
            try:
                guard.admit(f"q{number}", excluded)
            except TooManyExcludedError:
                found.append(False)
            else:
                found.append(True)
        outcomes.append(found)
    assert outcomes[1] == outcomes[0][kept:]
