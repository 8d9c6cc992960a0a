"""Shares, packing, rates, exclusion and the metrics of an update."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.replica.packing import pack as pack_row
from configs.training import TrainingConfig, UpdateMean
from storage.objects import Store
from storage.records import UpdateMetrics, decode, encode
from storage.samples import read_group
from tasks.training.events import Stepped
from tasks.training.metrics import Spent, update_metrics
from tasks.training.packing import SampleSize, measure_shared, pack
from tasks.training.plan import (
    TooManyExcludedError,
    check_excluded,
    divisor,
    group_facts,
    learning_rate,
    update_of,
    update_shares,
)
from tests.tasks.training.fakes import LAYOUT, config, make_group

sizes = st.lists(st.integers(1, 60), max_size=30)


@settings(max_examples=60)
@given(sizes, st.integers(16, 64), st.randoms())
def test_packing_covers_each_sample_once_within_budget(lengths, budget, random):
    samples = [SampleSize("g", index, n, 1) for index, n in enumerate(lengths)]
    rows = pack(samples, budget)
    assert sorted(s.index for row in rows for s in row) == list(range(len(samples)))
    for row in rows:
        assert row and (len(row) == 1 or sum(s.tokens for s in row) <= budget)
    mixed = list(samples)
    random.shuffle(mixed)
    assert pack(mixed, budget) == rows


def row_tokens(row, ids):
    """Tokens of a row in which the replica shares prefixes."""
    documents = [(np.array(ids[s.index], np.int32), np.zeros(len(ids[s.index]), bool)) for s in row]
    return len(pack_row(documents, share=True).ids)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 20)),
        min_size=1,
        max_size=30,
    ),
    st.integers(16, 64),
    st.randoms(),
)
def test_samples_that_share_a_prefix_fill_a_row_with_what_they_add(parts, budget, random):
    ids = [
        [trunk] * kept + [9] + [number % 7] * own for number, (trunk, kept, own) in enumerate(parts)
    ]
    flat = [SampleSize("g", index, len(one), 1) for index, one in enumerate(ids)]
    samples = measure_shared(flat, [np.array(one, np.int32) for one in ids])
    rows = pack(samples, budget)
    assert sorted(s.index for row in rows for s in row) == list(range(len(ids)))
    for row in rows:
        assert len(row) == 1 or row_tokens(row, ids) <= budget
    assert sum(s.new_tokens for s in samples) == row_tokens(samples, ids)
    mixed = list(samples)
    random.shuffle(mixed)
    assert pack(mixed, budget) == rows


@given(st.integers(0, 60), st.integers(1, 8))
def test_shares_are_even_and_cover_all_groups(groups, updates):
    shares = update_shares(groups, updates)
    assert sum(shares) == groups and len(shares) == updates
    assert max(shares) - min(shares) <= 1
    given_to = [update_of(arrival, shares) for arrival in range(groups)]
    assert [given_to.count(update) for update in range(updates)] == list(shares)
    assert given_to == sorted(given_to)
    assert update_of(groups, shares) == updates - 1


def test_learning_rate_rises_over_the_run():
    training = config(updates=2, **{"training.warmup_updates": 4}).training
    rates = [learning_rate(training, step, update) for step in range(3) for update in range(2)]
    assert rates == pytest.approx([training.learning_rate * f for f in (0.25, 0.5, 0.75, 1, 1, 1)])


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1, 0.1 + 0.9 * (2 + 2**0.5) / 4, 0.55, 0.1 + 0.9 * (2 - 2**0.5) / 4]),
    ],
)
def test_the_rate_falls_from_the_warm_up_to_the_end_of_the_run(schedule, shares):
    settings = {"training.steps": 5, "training.warmup_updates": 2, "training.schedule": schedule}
    if schedule != "constant":
        settings["training.final_rate"] = 0.1
    training = config(updates=1, **settings).training
    rates = [learning_rate(training, step, 0) for step in range(5)]
    assert rates == pytest.approx([training.learning_rate * share for share in shares])


@given(st.integers(1, 6), st.integers(1, 4), st.data(), st.sampled_from(["linear", "cosine"]))
def test_a_falling_rate_rises_once_falls_once_and_is_never_zero(steps, updates, data, schedule):
    training = TrainingConfig(
        steps=steps,
        updates_per_step=updates,
        schedule=schedule,
        warmup_updates=data.draw(st.integers(0, steps * updates - 1)),
    )
    rates = [
        learning_rate(training, step, update) for step in range(steps) for update in range(updates)
    ]
    top = rates.index(max(rates))
    assert rates[top] == training.learning_rate
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] > 0  # the core refuses a rate of zero


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"final_rate": 0.1}, "final_rate needs schedule=linear or cosine"),
        ({"schedule": "cosine", "warmup_updates": 8}, "leaves none of the run's 8 updates"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        TrainingConfig(steps=4, updates_per_step=2, **options)


@pytest.fixture
def facts(tmp_path):
    store = Store(tmp_path)

    def make(number, rewards, **more):
        return group_facts(
            read_group(store, LAYOUT.group(make_group(store, number, rewards, **more)))
        )

    return make


def test_divisor_counts_executions_not_samples(facts):
    groups = [facts(0, (0.0, 1.0, None)), facts(1, (0.5, 0.5)), facts(2, (0.0, 0.0, 1.0))]
    assert divisor(groups, UpdateMean.WITH_SPREAD, 2) == 5
    assert divisor(groups, UpdateMean.ALL_VALID, 2) == 7
    assert divisor([], UpdateMean.WITH_SPREAD, 2) == 0
    dropped = facts(3, (0.5, None, None))
    assert divisor([*groups, dropped], UpdateMean.ALL_VALID, 2) == 7
    assert divisor([*groups, dropped], UpdateMean.ALL_VALID, 3) == 3


def test_too_many_excluded_names_query_and_setting(facts):
    groups = [facts(0, (0.0, 1.0)), facts(1, (None, None))]
    check_excluded(groups, 0.5)
    with pytest.raises(TooManyExcludedError, match=r"2 of 4 .*max_excluded_share.*s00000-q0001"):
        check_excluded(groups, 0.49)
    check_excluded([], 0.0)


def metrics(groups, stats=(), stepped=None):
    stepped = stepped or Stepped(update=1, version=8, grad_norm=0.5, seconds=2.0, at=9.0)
    return update_metrics(
        step=0,
        trained_version=7,
        groups=groups,
        stats=list(stats),
        stepped=stepped,
        spent=Spent(rollout_s=3.0, switch_s=1.0),
    )


def test_metrics_are_over_targets_and_valid_executions(facts):
    groups = [
        facts(0, (0.0, 1.0, None), version=5, lengths=(8,)),
        facts(1, (0.25, 0.75), version=7, lengths=(24,)),
    ]
    stats = [
        {"clipped_sum": 1.0, "logprob_gap_sum": 4.0},
        {"clipped_sum": 0.0, "logprob_gap_sum": 12.0},
    ]
    line = metrics(groups, stats)
    assert (line.executions, line.valid, line.excluded, line.timed_out) == (5, 4, 1, 2)
    assert line.pass_rate == line.reward_mean == 0.5
    assert (line.target_tokens, line.trained_tokens) == (32, 64)
    assert line.staleness_mean == pytest.approx(2 * 8 / 32)
    assert line.staleness_max == 2
    assert line.clip_fraction == 0.25
    assert line.logprob_gap == 0.5
    assert (line.rollout_s, line.train_s, line.switch_s) == (3.0, 2.0, 1.0)


def test_figures_of_health_are_over_all_micro_steps(facts):
    groups = [
        facts(0, (0.0, 1.0), version=5, lengths=(8,)),
        facts(1, (0.25, 0.75), version=7, lengths=(24,)),
        facts(2, (0.5, 0.5), version=7),
    ]
    stats = [
        {
            "logprob_gap_sum@5": 2.0,
            "targets@5": 8.0,
            "logprob_gap_sum@7": 0.2,
            "targets@7": 4.0,
            "importance_sum": 10.0,
            "importance_square_sum": 12.0,
            "entropy_sum": 16.0,
            "clipped_low_sum": 1.0,
            "clipped_high_sum": 0.5,
            "kl_sum": 0.3,
        },
        {
            "logprob_gap_sum@7": 1.8,
            "targets@7": 16.0,
            "importance_sum": 22.0,
            "importance_square_sum": 28.0,
            "entropy_sum": 48.0,
            "clipped_low_sum": 0.0,
            "clipped_high_sum": 0.5,
            "kl_sum": 0.1,
        },
    ]
    line = metrics(groups, stats)
    assert line.logprob_gap_by_version == pytest.approx({5: 0.25, 7: 0.1})
    assert line.fresh_gap == pytest.approx(0.1)
    assert line.effective_samples == pytest.approx(32**2 / (32 * 40))
    assert line.entropy == 2.0
    assert (line.clip_fraction_low, line.clip_fraction_high) == (0.25, 0.25)
    assert line.kl == pytest.approx(0.1)
    assert (line.groups, line.groups_without_gradient) == (3, 1)
    assert not line.skipped
    assert decode(encode(line), UpdateMetrics) == line


def test_figures_that_no_replica_reported_are_absent(facts):
    line = metrics([facts(0, (0.0, 1.0), version=5)])
    assert line.effective_samples is line.entropy is line.kl is line.fresh_gap is None
    assert line.clip_fraction_low is line.clip_fraction_high is None
    assert line.logprob_gap_by_version == {}


def test_a_skipped_update_leaves_the_version(facts):
    group = facts(0, (0.0, 1.0))
    skipped = Stepped(update=1, version=7, grad_norm=None, seconds=0.0, at=1.0)
    assert metrics([group], stepped=skipped).skipped
    unknown = Stepped(update=1, version=8, grad_norm=None, seconds=0.0, at=1.0)
    assert not metrics([group], stepped=unknown).skipped, "the answer of that step was lost"


def test_an_update_without_valid_executions_has_no_rate_and_survives_storage(facts):
    stepped = Stepped(update=0, version=7, grad_norm=None, seconds=0.0, at=1.0)
    line = metrics([facts(0, (None, None))], stepped=stepped)
    assert line.pass_rate is None and line.grad_norm is None
    assert decode(encode(line), UpdateMetrics) == line
