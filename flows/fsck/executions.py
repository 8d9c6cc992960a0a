"""An execution: its result, its recorded calls, its verdicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cells.gateway.recording import SessionRecord, Turn
from flows.fsck.finding import Kind
from flows.fsck.reader import Reader
from storage.records import (
    Call,
    CallStatus,
    ExecutionOutcome,
    ExecutionResult,
    Scored,
    VerdictRecord,
)
from tasks.sampling.tree import CallTree, CallTreeError, build_tree


@dataclass(frozen=True)
class StoredExecution:
    """What could be read of an execution."""

    result: ExecutionResult | None
    tree: CallTree | None
    """None where the calls contradict each other or can't all be read."""
    verdicts: tuple[VerdictRecord, ...]
    """In order of their numbers."""


def check_execution(reader: Reader, name: str, query: str) -> StoredExecution:
    """Hold an execution's objects against each other."""
    layout = reader.layout
    result = reader.record(layout.execution_result(name), ExecutionResult)
    session = reader.record(layout.session(name), SessionRecord)
    before = len(reader.findings)
    calls = reader.journal(layout.calls(name), Call)
    turns = reader.journal(layout.turns(name), Turn)
    tree = _check_calls(reader, name, calls, turns)
    whole = len(reader.findings) == before
    if session is not None:
        reader.require(
            session.execution_id == name,
            layout.session(name),
            f"it is the session of {session.execution_id}",
        )
    elif calls and layout.session(name) not in reader.keys:
        reader.note(Kind.MISSING, layout.session(name), f"{len(calls)} calls are recorded")
    if result is not None:
        _check_result(reader, name, query, result, len(calls))
    verdicts = _check_verdicts(reader, name, query, result)
    return StoredExecution(result, tree if whole else None, verdicts)


def _check_calls(
    reader: Reader, name: str, calls: list[Call], turns: list[Turn]
) -> CallTree | None:
    key = reader.layout.calls(name)
    strange = {call.execution_id for call in calls} - {name}
    reader.require(not strange, key, f"calls of {', '.join(sorted(strange))} are among them")
    for call_id, count in Counter(call.call_id for call in calls).items():
        if count > 1:
            reader.note(Kind.REPEATED, key, f"call {call_id} is recorded {count} times")
    known = {turn.call_id for turn in turns}
    lost = [
        call.call_id
        for call in calls
        if call.status is CallStatus.COMPLETE and call.call_id not in known
    ]
    if lost:
        turns_key = reader.layout.turns(name)
        reader.note(Kind.MISSING, turns_key, f"the messages of call {_some(lost)}")
    try:
        return build_tree(calls)
    except CallTreeError as error:
        reader.note(Kind.CONTRADICTION, key, str(error))
        return None


def _check_result(
    reader: Reader, name: str, query: str, result: ExecutionResult, calls: int
) -> None:
    layout, key = reader.layout, reader.layout.execution_result(name)
    found = (result.execution_id, result.query_id)
    reader.require(found == (name, query), key, f"it is the result of {found[0]} in {found[1]}")
    reader.require(result.ended_at >= result.started_at, key, "it ended before it began")
    if result.calls > calls:
        reader.note(
            Kind.MISSING, layout.calls(name), f"{result.calls} calls were answered, {calls} found"
        )
    workspace = result.workspace_key
    if workspace is not None and workspace not in reader.keys:
        # `gyre gc` deletes the workspaces of a finished run, all at once.
        kind = Kind.MISSING if reader.below(f"{layout.prefix}/workspaces") else Kind.LEFT_OVER
        reader.note(kind, key, f"its workspace {workspace} is gone: it can't be scored again")


def _check_verdicts(
    reader: Reader, name: str, query: str, result: ExecutionResult | None
) -> tuple[VerdictRecord, ...]:
    layout = reader.layout
    found = []
    for number, key in enumerate(reader.below(layout.verdicts(name))):
        if key != layout.verdict(name, number):
            text = f"verdict {number} is not there, later ones are"
            reader.note(Kind.MISSING, layout.verdict(name, number), text)
            break
        record = reader.record(key, VerdictRecord)
        if record is None:
            continue
        told = (record.execution_id, record.query_id, record.version)
        reader.require(
            told == (name, query, number), key, f"it is verdict {told[2]} of {told[0]} in {told[1]}"
        )
        found.append(record)
        if not isinstance(record.verdict, Scored):
            continue
        if layout.execution_result(name) not in reader.keys:
            text = f"{key} has a reward"
            reader.note(Kind.MISSING, layout.execution_result(name), text)
        elif result is not None:
            failed = result.outcome is ExecutionOutcome.HOST_FAILED
            reader.require(not failed, key, "a reward, of an execution whose host failed")
            late = result.outcome is ExecutionOutcome.TIMED_OUT
            same = failed or record.verdict.timed_out == late
            reader.require(same, key, f"the execution's outcome is {result.outcome}")
    return tuple(found)


def _some(names: list[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
