"""Sealed groups: members, exclusion, and what stays when a verdict comes late."""

from __future__ import annotations

import pytest

from configs.load import load_config
from storage.journal import Journal
from storage.layout import RunLayout, execution_id
from storage.objects import Store
from storage.records import (
    CallKind,
    Excluded,
    ExecutionOutcome,
    ExecutionResult,
    QueryPlan,
    Scored,
    Split,
    VerdictRecord,
    encode,
)
from storage.samples import read_group
from tasks.sampling.group import build_group, is_sealed
from tests.tasks.sampling.executions import call

LAYOUT = RunLayout("r")
QUERY = QueryPlan(query_id="s00000-q0000", problem_id="p", split=Split.TRAIN, group_size=4)
NAMES = [execution_id(QUERY.query_id, member) for member in range(4)]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def result(name, outcome=ExecutionOutcome.COMPLETED, calls=2):
    return ExecutionResult(
        execution_id=name,
        query_id=QUERY.query_id,
        outcome=outcome,
        started_at=0.0,
        ended_at=1.0,
        waited_s=0.0,
        exit_code=0,
        calls=calls,
        workspace_key=None,
        detail="it broke",
    )


def scored(name, reward, timed_out=False):
    verdict = Scored(reward=reward, timed_out=timed_out, tests_passed=1, tests_total=2, log="")
    return VerdictRecord(
        execution_id=name,
        query_id=QUERY.query_id,
        version=0,
        late=False,
        scored_at=0.0,
        seconds=0.1,
        verdict=verdict,
    )


def record_calls(store, name):
    first = call(0, new=(1, 2), output=(3, 4), execution=name)
    second = call(1, first, kept=4, new=(5,), output=(6,), execution=name)
    journal = Journal(store, LAYOUT.calls(name))
    journal.append([encode(first), encode(second)])
    journal.close()


def build(store, results, verdicts):
    config = load_config("quickstart", environment={})
    return build_group(store, LAYOUT, config, QUERY, 0, results, verdicts)


def test_group_is_sealed_and_read_back_exactly(store):
    for name in NAMES:
        record_calls(store, name)
    verdicts = {
        name: scored(name, reward) for name, reward in zip(NAMES, (0, 1, 0, 1), strict=True)
    }
    assert not is_sealed(store, LAYOUT, QUERY.query_id)
    group = build(store, {name: result(name) for name in NAMES}, verdicts)
    assert is_sealed(store, LAYOUT, QUERY.query_id)
    assert group.header.spread
    assert [member.advantage for member in group.header.members] == pytest.approx(
        [-1, 1, -1, 1], rel=1e-3
    )
    assert all(member.target_tokens == 3 for member in group.header.members)
    assert all(member.kept == {CallKind.MAIN: 1} for member in group.header.members)
    assert all(member.dropped == {} for member in group.header.members)
    again = read_group(store, LAYOUT.group(QUERY.query_id))
    assert again.header == group.header
    for one, other in zip(group.samples, again.samples, strict=True):
        for name in ("ids", "targets", "logprobs", "versions"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        assert (one.execution_id, one.kind, one.advantage, one.weight) == (
            other.execution_id,
            other.kind,
            other.advantage,
            other.weight,
        )


def test_our_failures_are_excluded_and_leave_the_others_alone(store):
    for name in NAMES[:3]:
        record_calls(store, name)
    evaluator = scored(NAMES[2], 0.0).model_copy(
        update={"verdict": Excluded(reason="evaluator_failed", detail="no disk")}
    )
    group = build(
        store,
        {
            NAMES[0]: result(NAMES[0], ExecutionOutcome.TIMED_OUT),
            NAMES[1]: result(NAMES[1]),
            NAMES[2]: result(NAMES[2]),
            NAMES[3]: result(NAMES[3], ExecutionOutcome.HOST_FAILED),
        },
        {
            NAMES[0]: scored(NAMES[0], 0.5, timed_out=True),
            NAMES[1]: scored(NAMES[1], 1.0),
            NAMES[2]: evaluator,
            NAMES[3]: scored(NAMES[3], 0.0),
        },
    )
    advantages = [member.advantage for member in group.header.members]
    assert advantages[:2] == pytest.approx([-1, 1], rel=1e-3)
    assert advantages[2:] == [None, None]
    reasons = [getattr(member.verdict, "reason", None) for member in group.header.members]
    assert reasons == [None, None, "evaluator_failed", "host_failed"]
    assert {sample.execution_id for sample in group.samples} == set(NAMES[:2])


@pytest.mark.parametrize("reason", ["evaluator_failed", "host_failed"])
def test_what_an_excluded_execution_did_changes_no_sample(tmp_path, reason):
    def sealed(folder, reward, calls):
        store = Store(folder)
        for name in NAMES[:3]:
            record_calls(store, name)
        Journal(store, LAYOUT.calls(NAMES[3])).append([encode(one) for one in calls])
        results = {name: result(name) for name in NAMES}
        verdicts = {
            name: scored(name, value)
            for name, value in zip(NAMES, (0, 1, 0.5, reward), strict=True)
        }
        if reason == "host_failed":
            results[NAMES[3]] = result(NAMES[3], ExecutionOutcome.HOST_FAILED)
        else:
            lost = Excluded(reason=reason, detail=str(reward))
            verdicts[NAMES[3]] = verdicts[NAMES[3]].model_copy(update={"verdict": lost})
        return build(store, results, verdicts)

    other = call(0, new=(9, 9), output=(7, 7, 7), execution=NAMES[3])
    one, two = sealed(tmp_path / "one", 1.0, [other]), sealed(tmp_path / "two", 0.0, [])
    assert [m.advantage for m in one.header.members] == [m.advantage for m in two.header.members]
    assert len(one.samples) == len(two.samples) == 3
    for sample, same in zip(one.samples, two.samples, strict=True):
        for name in ("ids", "targets", "logprobs", "versions"):
            assert getattr(sample, name).tobytes() == getattr(same, name).tobytes()
        assert (sample.advantage, sample.weight) == (same.advantage, same.weight)


def test_damaged_or_lost_calls_exclude_their_own_execution(store):
    record_calls(store, NAMES[0])
    record_calls(store, NAMES[1])
    Journal(store, LAYOUT.calls(NAMES[2])).append([b"{not json"])
    group = build(
        store,
        {name: result(name) for name in NAMES},
        {name: scored(name, reward) for name, reward in zip(NAMES, (0, 1, 1, 1), strict=True)},
    )
    reasons = [getattr(member.verdict, "reason", None) for member in group.header.members]
    assert reasons == [None, None, "calls_damaged", "calls_lost"]


def test_missing_results_and_verdicts_are_excluded(store):
    record_calls(store, NAMES[0])
    group = build(store, {NAMES[0]: result(NAMES[0])}, {})
    reasons = [getattr(member.verdict, "reason", None) for member in group.header.members]
    assert reasons == ["no_verdict", "no_result", "no_result", "no_result"]
    assert not group.header.spread and not group.samples


def test_a_group_without_spread_has_no_samples(store):
    for name in NAMES:
        record_calls(store, name)
    group = build(
        store,
        {name: result(name) for name in NAMES},
        {name: scored(name, 0.5) for name in NAMES},
    )
    assert not group.header.spread and not group.samples
    assert [member.advantage for member in group.header.members] == [None] * 4


def test_what_is_sealed_stays(store):
    for name in NAMES:
        record_calls(store, name)
    results = {name: result(name) for name in NAMES}
    first = build(store, results, {name: scored(name, 0.5) for name in NAMES})
    late = {name: scored(name, reward) for name, reward in zip(NAMES, (0, 1, 0, 1), strict=True)}
    assert build(store, results, late).header == first.header


@pytest.mark.parametrize(("least", "trained"), [(2, 2), (3, 0)])
def test_a_group_with_too_few_valid_members_is_dropped(store, least, trained):
    for name in NAMES:
        record_calls(store, name)
    config = load_config("quickstart", [f"scoring.min_valid={least}"], environment={})
    verdicts = {NAMES[0]: scored(NAMES[0], 0.0), NAMES[1]: scored(NAMES[1], 1.0)}
    results = {name: result(name) for name in NAMES}
    group = build_group(store, LAYOUT, config, QUERY, 0, results, verdicts)
    assert len({sample.execution_id for sample in group.samples}) == trained
    assert group.header.spread is bool(trained)
    advantages = [member.advantage for member in group.header.members]
    assert sum(advantage is not None for advantage in advantages) == trained
    assert isinstance(group.header.members[1].verdict, Scored)  # kept all the same
