"""Records carry their kind and format; what can't be read is refused by name."""

from __future__ import annotations

import math
from typing import ClassVar

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from storage.records import (
    Call,
    CallKind,
    CallStatus,
    Evaluation,
    Excluded,
    Record,
    RecordError,
    Scored,
    StepDone,
    VerdictRecord,
    VersionSpan,
    decode,
    encode,
    encode_finite,
)


class _Newer(Record):
    FORMAT: ClassVar[int] = 2

    value: float


class _Empty(Record):
    pass


def _verdict(verdict: Scored | Excluded) -> VerdictRecord:
    return VerdictRecord(
        execution_id="s00000-q0001-e002",
        query_id="s00000-q0001",
        version=1,
        late=False,
        scored_at=3.5,
        seconds=0.5,
        verdict=verdict,
    )


def test_excluded_is_no_zero() -> None:
    excluded = Excluded(reason="evaluator_failed", detail="exit 137")
    scored = Scored(reward=0, timed_out=True, tests_passed=0, tests_total=4, log="")
    assert decode(encode(_verdict(excluded)), VerdictRecord).verdict == excluded
    assert decode(encode(_verdict(scored)), VerdictRecord).verdict == scored
    assert not hasattr(excluded, "reward")


def test_records_are_frozen() -> None:
    with pytest.raises(ValidationError):
        _verdict(Excluded(reason="r", detail="")).version = 2  # type: ignore[misc]


_floats = st.floats(width=64)


@given(value=_floats)
def test_any_number_survives(value: float) -> None:
    found = decode(encode(_Newer(value=value)), _Newer).value
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_a_record_without_fields() -> None:
    assert decode(encode(_Empty()), _Empty) == _Empty()


@given(
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    logprobs=st.lists(st.floats(max_value=0), max_size=20),
    text=st.text(max_size=30),
)
def test_calls_survive(ids: list[int], logprobs: list[float], text: str) -> None:
    call = Call(
        call_id="c1",
        execution_id="e1",
        index=0,
        parent=None,
        kept=0,
        new_ids=tuple(ids),
        output_ids=tuple(ids),
        output_logprobs=tuple(0.0 if math.isnan(value) else value for value in logprobs),
        spans=(VersionSpan(version=1, start=0, end=len(ids)),),
        kind=CallKind.MAIN,
        kind_reason=text,
        agent="main",
        status=CallStatus.COMPLETE,
        finish_reason="stop",
        fork_reason=None,
        started_at=1.0,
        waited_s=0.0,
        seconds=0.1,
        cell="a",
        cached_tokens=0,
    )
    line = encode(call)
    assert b"\n" not in line
    assert decode(line, Call) == call


@given(
    done=st.builds(
        StepDone,
        step=st.integers(0, 10**6),
        policy_version=st.integers(0, 10**6),
        seconds=st.floats(0, 1e9),
    ),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_one_bit_that_is_not_as_it_was_written_is_noticed(
    done: StepDone, where: float, bit: int
) -> None:
    line = bytearray(encode(done))
    line[int(where * len(line))] ^= 1 << bit
    with pytest.raises(RecordError):
        decode(bytes(line), StepDone)


def test_a_record_that_was_changed_by_hand_is_refused_and_one_without_a_checksum_is_read() -> None:
    done = StepDone(step=3, policy_version=16, seconds=1.5)
    with pytest.raises(RecordError, match="key: its checksum differs"):
        decode(encode(done).replace(b":16,", b":17,"), StepDone, where="key")
    older = b'{"record":"StepDone","format":1,"step":3,"policy_version":16,"seconds":1.5}'
    assert decode(older, StepDone) == done


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a _Newer record"),
        (b"{}", "not a _Newer record"),
        (encode(_Empty()), "not a _Newer record"),
        (b'{"record":"_Newer","value":1}', "format None, this version reads 2"),
        (b'{"record":"_Newer","format":1,"value":1}', "format 1, this version reads 2"),
        (b'{"record":"_Newer","format":3,"value":1}', "format 3, this version reads 2"),
        (b'{"record":"_Newer","format":2}', "value"),
        (b'{"record":"_Newer","format":2,"value":1,"more":2}', "more"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode(data, _Newer, where="runs/x/object.json")
    assert str(caught.value).startswith("runs/x/object.json: ")
    assert message in str(caught.value)


def test_the_kind_is_readable_without_this_library() -> None:
    evaluation = Evaluation(
        version=3,
        problems=1,
        executions=2,
        excluded=0,
        timed_out=0,
        pass_rate=0.5,
        standard_error=0.1,
        rates={"specrepo-held_out-1-1": 0.5},
    )
    body = orjson.loads(encode(evaluation))
    assert (body["record"], body["format"], body["pass_rate"]) == ("Evaluation", 1, 0.5)


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), FINITE)),
    st.lists(st.builds(VersionSpan, version=st.integers(0, 99), start=st.just(0), end=st.just(3))),
    st.text(),
    st.sampled_from(CallStatus),
    FINITE,
)
def test_finite_records_read_the_same_whoever_wrote_them(rows, spans, text, status, time) -> None:
    call = Call(
        call_id="c",
        execution_id="e",
        index=0,
        parent=None,
        kept=0,
        new_ids=(),
        output_ids=tuple(one for one, _ in rows),
        output_logprobs=tuple(logprob for _, logprob in rows),
        spans=tuple(spans),
        kind=CallKind.MAIN,
        kind_reason=text,
        agent="main",
        status=status,
        finish_reason="stop",
        fork_reason=None,
        started_at=time,
        waited_s=0.0,
        seconds=0.0,
        cell="a",
        cached_tokens=0,
    )
    assert decode(encode_finite(call), Call) == decode(encode(call), Call) == call
