"""Frozen records of a run. Each carries its format version; an older one is read or refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

R = TypeVar("R", bound="Record")

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


class RecordError(ValueError):
    """Bytes that are not the expected record, or of a format that this version can't read."""


class Record(BaseModel):
    """Base of everything that is stored as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")
    FORMAT: ClassVar[int] = 1
    """Raise it with a change that an earlier Gyre could not read, or would misread. A new field
    with a default needs no new format."""
    OLDER: ClassVar[Mapping[int, Upgrade]] = {}
    """How a body of an older format becomes one of the next, for each that can still be read."""


_CRC = b',"crc":"'
_CRC_DIGITS = 8


def encode(record: Record) -> bytes:
    """A record as one line of JSON with its kind, format version and checksum."""
    # pydantic writes the body: orjson would turn a NaN or an infinity into null.
    return _line(record, record.model_dump_json().encode())


def encode_finite(record: Record) -> bytes:
    """The same of a record whose numbers are all finite, several times as fast."""
    return _line(record, orjson.dumps(record.__dict__, default=_fields))


def _line(record: Record, body: bytes) -> bytes:
    head = orjson.dumps({"record": type(record).__name__, "format": record.FORMAT})[:-1]
    rest = b"," + body[1:] if body != b"{}" else b"}"
    return b'%s%s%08x"%s' % (head, _CRC, _crc(head, rest), rest)


def _fields(inner: Record) -> dict[str, Any]:
    return inner.__dict__


def decode(data: bytes, kind: type[R], where: str = "record") -> R:
    """The record in ``data``; one of an older format is brought to this one.

    Raises:
        RecordError: names ``where``, what was found and what was expected.
    """
    try:
        body: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"{where}: not JSON: {error}") from None
    if not isinstance(body, dict) or body.pop("record", None) != kind.__name__:
        raise RecordError(f"{where}: not a {kind.__name__} record")
    version = body.pop("format", None)
    _check_format(kind, version, where)
    # One that was written before there were checksums has none.
    if "crc" in body and not _is_whole(data, body.pop("crc")):
        raise RecordError(f"{where}: its checksum differs: it is damaged, or was changed by hand")
    for older in range(version, kind.FORMAT):
        body = kind.OLDER[older](body)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RecordError(f"{where}: {error}") from None


def check_record(data: bytes, where: str = "record") -> None:
    """See that ``data`` is a whole record of some kind and format.

    Raises:
        RecordError: names ``where``, and what is wrong.
    """
    try:
        body: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"{where}: not JSON: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("record"), str):
        raise RecordError(f"{where}: not a record")
    if "crc" in body and not _is_whole(data, body["crc"]):
        raise RecordError(f"{where}: its checksum differs: it is damaged, or was changed by hand")


def _check_format(kind: type[Record], version: Any, where: str) -> None:
    found = f"{where}: {kind.__name__} of format {version}, this version reads {kind.FORMAT}"
    if type(version) is not int or version < 1:
        raise RecordError(f"{found}: it is damaged, or no record of Gyre")
    if version > kind.FORMAT:
        raise RecordError(f"{found}: a newer Gyre wrote it; install that one to read it")
    if any(older not in kind.OLDER for older in range(version, kind.FORMAT)):
        raise RecordError(f"{found}: an older Gyre wrote it; read it with that one")


def _is_whole(data: bytes, crc: Any) -> bool:
    """Whether all bytes but those of the checksum are as they were written."""
    head, mark, rest = data.partition(_CRC)
    if not mark or not isinstance(crc, str) or rest[:_CRC_DIGITS] != crc.encode():
        return False
    return b"%08x" % _crc(head, rest[_CRC_DIGITS + 1 :]) == rest[:_CRC_DIGITS]


def _crc(head: bytes, rest: bytes) -> int:
    return zlib.crc32(rest, zlib.crc32(head))


class Split(StrEnum):
    """Which problems may be trained on."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class QueryPlan(Record):
    """One problem in one step."""

    query_id: str
    problem_id: str
    split: Split
    group_size: int


class StepPlan(Record):
    """What a step launches, fixed before its first execution starts."""

    step: int
    policy_version: int
    queries: tuple[QueryPlan, ...]


class ExecutionSpec(Record):
    """One run of a harness on a problem, as it is handed to an execution host."""

    execution_id: str
    query_id: str
    member: int
    problem_id: str
    split: Split
    policy_version: int
    temperature: float
    seed: int
    newer: bool = False
    """Weights that are newer than ``policy_version`` may serve it as well: it may be carried over
    into the next step."""


class ExecutionOutcome(StrEnum):
    """How an execution ended."""

    COMPLETED = "completed"
    TIMED_OUT = "timed_out"
    HOST_FAILED = "host_failed"
    """Our side failed (sandbox, storage, gateway): there is nothing to score."""


class ExecutionResult(Record):
    """What an execution left behind. Times are seconds since the epoch."""

    execution_id: str
    query_id: str
    outcome: ExecutionOutcome
    started_at: float
    ended_at: float
    waited_s: float
    """Time spent waiting in the gateway; the execution's clock leaves it out."""
    exit_code: int | None
    calls: int
    workspace_key: str | None
    detail: str


class Scored(Record):
    """A reward in [0, 1]."""

    kind: Literal["scored"] = "scored"
    reward: float = Field(ge=0, le=1)
    timed_out: bool
    tests_passed: int
    tests_total: int
    log: str


class Excluded(Record):
    """No reward: our side failed. Never a number."""

    kind: Literal["excluded"] = "excluded"
    reason: str
    detail: str


Verdict = Annotated[Scored | Excluded, Field(discriminator="kind")]


class VerdictRecord(Record):
    """A verdict with its history: versions are never overwritten."""

    execution_id: str
    query_id: str
    version: int
    late: bool
    """The group was sealed before this verdict came: kept, not trained."""
    scored_at: float
    seconds: float
    verdict: Verdict


class CallKind(StrEnum):
    """What a model call was for."""

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    BACKGROUND = "background"


class CallStatus(StrEnum):
    """Whether the client got the whole answer."""

    COMPLETE = "complete"
    ABANDONED = "abandoned"


class VersionSpan(Record):
    """Output tokens [start, end) of a call that one weight version made."""

    version: int
    start: int
    end: int


class Served(Record):
    """What one cell did of a call."""

    cell: str
    prompt_tokens: int
    """Ids that it was given: the prompt, and what had been sampled before."""
    cached_tokens: int
    """Of these, the ones that it did not have to compute."""


class Call(Record):
    """One model call. Its prompt is the first ``kept`` ids of its parent's prompt and output,
    followed by ``new_ids``; the whole prompt is never stored again."""

    call_id: str
    execution_id: str
    index: int
    """Order of arrival within the execution."""
    parent: str | None
    kept: int
    new_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    """Behaviour log-probability of each output id, natural logarithm, in the distribution that was
    sampled from: of the logits over the temperature, before ``top_p`` cut anything. A trainer that
    compares them with its own at temperature 1 needs rollouts at 1."""
    spans: tuple[VersionSpan, ...]
    kind: CallKind
    kind_reason: str
    agent: str
    """Label of the agent inside the execution: ``main`` or a sub-agent's."""
    status: CallStatus
    finish_reason: str
    fork_reason: str | None
    """Why the call does not extend the last call of its agent, where it does not."""
    started_at: float
    waited_s: float
    seconds: float
    cell: str
    """That sampled the last ids."""
    cached_tokens: int
    """Of the prompt, on the cell where the call began."""
    parent_agent: str | None = None
    """The agent that started this one, for a sub-agent."""
    served: tuple[Served, ...] = ()
    """All that it was sent to, in order, where that was more than once."""


class Member(Record):
    """An execution inside a sealed group."""

    execution_id: str
    verdict: Verdict
    advantage: float | None
    """None: excluded, or a group without spread or with fewer than two valid members."""
    paths: int
    """Trajectories with targets before the cap."""
    selected: int
    target_tokens: int = 0
    """Targets of the selected trajectories."""
    dropped_tokens: int = 0
    """Sampled tokens that only trajectories beyond the cap hold."""
    cut_tokens: int = 0
    """Sampled tokens of calls that end beyond the longest trajectory."""
    kept: dict[CallKind, int] = {}
    """Trajectories that are trained, by kind."""
    dropped: dict[CallKind, int] = {}
    """Trajectories beyond the cap, by kind."""


class GroupHeader(Record):
    """The readable part of a sealed group; its samples lie beside it in the same object."""

    query_id: str
    step: int
    problem_id: str
    sealed_at: float
    members: tuple[Member, ...]
    spread: bool
    """Whether there are enough valid members, and at least two of them differ in reward."""


class CheckpointManifest(Record):
    """Written last: a checkpoint without it does not exist."""

    version: int
    step: int
    update: int
    """Updates of that step that are in the weights."""
    files: dict[str, str]
    """Name to sha256."""


class UpdateMetrics(Record):
    """One line of metrics.jsonl: one update."""

    step: int
    update: int
    policy_version: int
    """Version after the update."""
    executions: int
    valid: int
    excluded: int
    timed_out: int
    reward_mean: float | None
    pass_rate: float | None
    """Mean reward of valid executions; None when there was none."""
    staleness_mean: float
    staleness_max: int
    clip_fraction: float
    grad_norm: float | None
    """Before clipping; None when it was not finite, so that the update was skipped."""
    logprob_gap: float
    """Mean over target tokens of |trainer's log-prob - recorded|."""
    logprob_gap_max: float
    """The largest of these differences."""
    target_tokens: int
    trained_tokens: int
    computed_tokens: int | None = None
    """Tokens that went through the model: fewer than ``trained_tokens`` where samples share
    prefixes. None in a record of an older version."""
    rollout_s: float
    train_s: float
    switch_s: float
    ended_at: float
    # What follows is None or empty in a record of an older version.
    skipped: bool = False
    """The gradient was not finite: the weights are those of before."""
    learning_rate: float | None = None
    logprob_gap_by_version: dict[int, float] = {}
    """The mean gap of the targets that each version sampled."""
    fresh_gap: float | None = None
    """Of those that the trained version itself sampled: engine against trainer. None without."""
    clip_fraction_low: float | None = None
    clip_fraction_high: float | None = None
    effective_samples: float | None = None
    """(sum w)^2 / (n sum w^2) over the n targets, w = policy / behaviour; 1 when nothing moved."""
    entropy: float | None = None
    """Mean over targets of the policy's entropy, in nats."""
    kl: float | None = None
    """Mean over samples of the divergence to the reference policy; None without that term."""
    groups: int = 0
    groups_without_gradient: int = 0
    """Without spread in their rewards, with too few valid executions, or too old."""
    groups_stale: int = 0
    """Left out of the update: older than the bound on staleness allows."""
    busy_s: float | None = None
    """Seconds of all replicas in its micro-steps, added up."""


class Evaluation(Record):
    """Held-out result of one weight version."""

    version: int
    problems: int
    """Problems with at least one valid execution."""
    executions: int
    """Valid executions."""
    excluded: int
    timed_out: int
    pass_rate: float
    """Mean over problems of the mean reward of their valid executions."""
    standard_error: float
    rates: dict[str, float]
    """Problem id to its mean reward."""
    samples: int | None = None
    """Executions of each problem, excluded ones too; None in results of older versions of Gyre."""
    seed: int | None = None
    """Seed of the problems; None as above."""
    rewards: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Problem id to the reward of each valid execution; empty as above."""


class StepDone(Record):
    """A step whose updates are all in a checkpoint."""

    step: int
    policy_version: int
    """Version after its last update."""
    seconds: float
    carried: tuple[str, ...] = ()
    """Queries that were launched up to then and are trained in a later step."""
