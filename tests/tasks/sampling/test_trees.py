"""The tree stores every shared prefix once and gives every output its original context."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from storage.records import CallStatus, VersionSpan
from tasks.sampling.tree import CallTreeError, build_tree
from tests.tasks.sampling.executions import Reading, call, executions


@settings(max_examples=50)
@given(executions())
def test_every_call_keeps_its_own_prompt_and_output(calls):
    tree, reading = build_tree(calls), Reading(calls)
    for placed in tree.calls:
        history = [token.id for token in reading.histories[placed.call.call_id]]
        assert tree.ids(placed.end).tolist() == history
        assert placed.tokens == len(history)


@settings(max_examples=50)
@given(executions())
def test_each_distinct_prefix_is_stored_once(calls):
    tree, reading = build_tree(calls), Reading(calls)
    prefixes = {
        history[:length]
        for history in reading.histories.values()
        for length in range(1, len(history) + 1)
    }
    assert sum(len(segment.ids) for segment in tree.segments) == len(prefixes)
    assert all(segment.parent < number for number, segment in enumerate(tree.segments))


@settings(max_examples=30)
@given(executions())
def test_order_on_disk_does_not_matter(calls):
    mixed = calls * 2  # a line that was written twice counts once
    random.Random(1).shuffle(mixed)
    one, other = build_tree(calls), build_tree(mixed)
    assert [placed.call for placed in one.calls] == [placed.call for placed in other.calls]
    assert [placed.end for placed in one.calls] == [placed.end for placed in other.calls]
    assert all(
        left.ids.tobytes() == right.ids.tobytes()
        for left, right in zip(one.segments, other.segments, strict=True)
    )


def test_a_small_edit_forks_and_leaves_the_old_answer_whole():
    first = call(0, new=(1, 2, 3), output=(4, 5, 6))
    edited = call(1, first, kept=4, new=(9,), output=(7,))
    tree = build_tree([first, edited])
    assert tree.ids(tree.calls[0].end).tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.ids(tree.calls[1].end).tolist() == [1, 2, 3, 4, 9, 7]
    assert sorted(len(segment.ids) for segment in tree.segments) == [1, 1, 1, 2, 3]


def test_equal_answers_of_a_retry_stay_two_samples():
    first = call(0, new=(1, 2), output=(3, 4), status=CallStatus.ABANDONED)
    tree = build_tree([first, call(1, new=(1, 2), output=(3, 4))])
    assert [segment.call for segment in tree.segments] == [None, 0, 1]


def test_cost_follows_the_new_tokens():
    parent, length, calls = None, 0, []
    for number in range(500):
        kept = length if number % 25 else length // 2
        one = call(number, parent, kept=kept, new=(number % 7,) * 30, output=(number % 5,) * 20)
        calls.append(one)
        parent, length = one, kept + 50
    tree = build_tree(calls)
    assert sum(len(segment.ids) for segment in tree.segments) <= 500 * 50


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"parent": "c9"}, "not recorded"),
        ({"parent": "c000"}, "own ancestor"),
        ({"kept": 1}, "keeps 1 of 0"),
        ({"output_logprobs": ()}, "0 log-probabilities for 1"),
        ({"spans": (VersionSpan(version=0, start=1, end=2),)}, "spans cover 0 of 1"),
        ({"new_ids": ()}, "prompt is empty"),
        ({"new_ids": (2**40,)}, "larger than 32 bits"),
    ],
)
def test_contradictions_are_named(broken, message):
    one = call(0, new=(1,), output=(2,)).model_copy(update=broken)
    with pytest.raises(CallTreeError, match=message):
        build_tree([one])


def test_two_different_records_of_one_call_are_refused():
    with pytest.raises(CallTreeError, match="c000: recorded twice"):
        build_tree([call(0, new=(1,), output=(2,)), call(0, new=(1,), output=(3,))])
