"""Selection and samples: each target once, in its own context, highest rank first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.training import ExecutionMean, TrajectoryConfig, WithinKind
from storage.records import CallKind, CallStatus
from tasks.sampling.samples import make_samples
from tasks.sampling.selection import select
from tasks.sampling.tree import build_tree
from tests.tasks.sampling.executions import Reading, call, executions, mark

LONG = 1000
configs = st.builds(
    TrajectoryConfig,
    cap=st.one_of(st.none(), st.integers(1, 4)),
    within_kind=st.sampled_from(WithinKind),
)
contexts = st.sampled_from([LONG, 12, 6])


def samples_of(calls, config, context=LONG, mean=ExecutionMean.TRAJECTORY):
    tree = build_tree(calls)
    selection = select(tree, config, context)
    return make_samples(tree, selection, execution_id="e", advantage=1.0, mean=mean), selection


@given(executions(), configs, contexts)
def test_selection_equals_the_plain_reading(calls, config, context):
    tree, reading = build_tree(calls), Reading(calls)
    found = select(tree, config, context)
    chosen = reading.selected(config.cap, config.within_kind, context)
    everything = reading.selected(None, config.within_kind, context)
    assert [tree.calls[one.tip].call.call_id for one in found.trajectories] == [
        name for name, _ in chosen
    ]
    assert [one.target_tokens for one in found.trajectories] == [len(own) for _, own in chosen]
    assert found.paths == len(everything)
    kinds = [reading.calls[name].kind for name, _ in everything]
    for kind in CallKind:
        kept = sum(one.kind is kind for one in found.trajectories)
        assert found.kept.get(kind, 0) == kept
        assert found.dropped.get(kind, 0) == kinds.count(kind) - kept
    total = sum(len(own) for _, own in everything)
    assert found.dropped_tokens == total - found.target_tokens
    assert found.cut_tokens == sum(
        len(reading.calls[name].output_ids)
        for name in reading.trained(LONG) - reading.trained(context)
    )


@given(executions(), configs, contexts)
def test_each_sampled_token_is_a_target_once_in_its_own_context(calls, config, context):
    reading = Reading(calls)
    samples, _ = samples_of(calls, config, context)
    by_mark = {
        mark(one.index, offset): (one, offset)
        for one in calls
        for offset in range(len(one.output_ids))
    }
    seen: list[float] = []
    for sample in samples:
        assert sample.targets.any() and not sample.targets[0]
        assert len(sample.ids) <= context
        assert not sample.logprobs[~sample.targets].any()
        assert (sample.versions[~sample.targets] == -1).all()
        for position in sample.targets.nonzero()[0]:
            one, offset = by_mark[float(sample.logprobs[position])]
            history = reading.prompts[one.call_id]
            before = [token.id for token in history] + list(one.output_ids[:offset])
            assert sample.ids[:position].tolist() == before
            assert sample.ids[position] == one.output_ids[offset]
            span = next(span for span in one.spans if span.start <= offset < span.end)
            assert sample.versions[position] == span.version
            seen.append(float(sample.logprobs[position]))
    trained = reading.trained(context)
    selectable = {key for key, (one, _) in by_mark.items() if one.call_id in trained}
    assert len(seen) == len(set(seen))
    assert set(seen) <= selectable
    if config.cap is None:
        assert set(seen) == selectable


@settings(max_examples=30)
@given(executions(), configs, st.sampled_from(ExecutionMean))
def test_an_execution_has_one_vote_whatever_its_branches(calls, config, mean):
    samples, _ = samples_of(calls, config, mean=mean)
    if samples:
        assert sum(sample.weight for sample in samples) == pytest.approx(1)


@settings(max_examples=30)
@given(executions(), configs)
def test_order_on_disk_changes_no_sample(calls, config):
    mixed = list(calls)
    random.Random(2).shuffle(mixed)
    for one, other in zip(samples_of(calls, config)[0], samples_of(mixed, config)[0], strict=True):
        for name in ("ids", "targets", "logprobs", "versions"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        assert (one.kind, one.weight) == (other.kind, other.weight)


@settings(max_examples=30)
@given(executions(), configs)
def test_abandoned_and_background_answers_influence_no_target(calls, config):
    def scrambled(one):
        if one.status is CallStatus.COMPLETE and one.kind is not CallKind.BACKGROUND:
            return one
        return one.model_copy(update={"output_logprobs": (-99.0,) * len(one.output_ids)})

    samples, _ = samples_of(calls, config)
    others, _ = samples_of([scrambled(one) for one in calls], config)
    assert [s.logprobs.tobytes() for s in samples] == [s.logprobs.tobytes() for s in others]


def compaction():
    """Two turns, a summary, the fresh history after it, and a sub-agent."""
    first = call(0, new=(1, 2), output=(3, 4))
    second = call(1, first, kept=4, new=(5,), output=(6,))
    summary = call(2, second, kept=6, new=(7,), output=(8, 9), kind=CallKind.MAIN_SUMMARY)
    fresh = call(3, new=(1, 9), output=(10,))
    helper = call(4, new=(1, 8), output=(11,), kind=CallKind.SUB_AGENT)
    return [first, second, summary, fresh, helper]


def test_turns_before_a_compaction_are_targets_of_the_summary_path():
    samples, selection = samples_of(compaction(), TrajectoryConfig())
    assert [sample.kind for sample in samples] == [
        CallKind.MAIN,
        CallKind.MAIN_SUMMARY,
        CallKind.SUB_AGENT,
    ]
    assert samples[1].ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert samples[1].ids[samples[1].targets].tolist() == [3, 4, 6, 8, 9]
    assert selection.dropped_tokens == 0


def test_turns_shared_by_summary_and_main_are_targets_of_main():
    first = call(0, new=(1,), output=(2, 3))
    summary = call(1, first, kept=3, new=(4,), output=(5,), kind=CallKind.MAIN_SUMMARY)
    later = call(2, first, kept=3, new=(6,), output=(7,))
    samples, _ = samples_of([first, summary, later], TrajectoryConfig())
    assert [sample.ids[sample.targets].tolist() for sample in samples] == [[2, 3, 7], [5]]


def test_cap_drops_the_lowest_kind_and_says_so():
    samples, selection = samples_of(compaction(), TrajectoryConfig(cap=2))
    assert len(samples) == 2
    assert selection.dropped[CallKind.SUB_AGENT] == 1
    assert (selection.paths, selection.dropped_tokens) == (3, 1)


def test_latest_prefers_the_last_call_and_most_targets_the_longest():
    long = call(0, new=(1,), output=(2, 3, 4))
    late = call(1, new=(5,), output=(6,))
    latest, _ = samples_of([long, late], TrajectoryConfig(cap=1, within_kind=WithinKind.LATEST))
    most, _ = samples_of([long, late], TrajectoryConfig(cap=1))
    assert (latest[0].ids.tolist(), most[0].ids.tolist()) == ([5, 6], [1, 2, 3, 4])


def test_a_path_beyond_the_context_is_cut_at_the_call_before():
    first = call(0, new=(1, 2), output=(3,))
    second = call(1, first, kept=3, new=(4, 5), output=(6, 7))
    samples, selection = samples_of([first, second], TrajectoryConfig(), context=6)
    assert [sample.ids.tolist() for sample in samples] == [[1, 2, 3]]
    assert selection.cut_tokens == 2


@settings(max_examples=30)
@given(executions(most=20), st.integers(16, 40))
def test_the_longest_trajectory_may_be_set_below_the_context(calls, longest):
    short = TrajectoryConfig(max_tokens=longest, cap=None)
    samples, selection = samples_of(calls, short)
    others, other = samples_of(calls, TrajectoryConfig(cap=None), context=longest)
    assert selection == other
    assert [s.ids.tolist() for s in samples] == [s.ids.tolist() for s in others]
    trained = Reading(calls).trained(LONG)
    sampled = sum(len(one.output_ids) for one in calls if one.call_id in trained)
    assert selection.target_tokens + selection.cut_tokens == sampled


@given(executions(), configs)
def test_positions_count_the_tokens_of_a_trajectory(calls, config):
    for sample in samples_of(calls, config)[0]:
        assert sample.positions.tolist() == list(range(len(sample.ids)))
