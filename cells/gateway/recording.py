"""What is kept of every call, so that it can be trained on and a restarted gateway can go on."""

from __future__ import annotations

from array import array
from typing import Any

from cells.gateway.matching import Branches, Node
from storage.journal import Journal, read_journal
from storage.layout import RunLayout
from storage.objects import MissingObjectError, Store
from storage.records import Call, CallStatus, Record, decode, encode


class SessionRecord(Record):
    """How an execution was opened."""

    execution_id: str
    api_key: str
    temperature: float
    policy_version: int
    closed: bool


class Turn(Record):
    """The messages of a completed call: what its request added to its parent's history, and the
    reply that was sent. Only the matching of later requests needs them; ids are in the call."""

    call_id: str
    messages: tuple[dict[str, Any], ...]
    reply: dict[str, Any]
    tools: str


class ExecutionLog:
    """The journals of one execution. Its methods block: call them in a thread."""

    def __init__(self, store: Store, layout: RunLayout, execution_id: str) -> None:
        self._store = store
        self._session_key = layout.session(execution_id)
        self._calls_prefix = layout.calls(execution_id)
        self._turns_prefix = layout.turns(execution_id)
        self._calls: Journal | None = None
        self._turns: Journal | None = None

    def session(self) -> SessionRecord | None:
        """How the execution was opened, if it was."""
        try:
            return self._store.read_record(self._session_key, SessionRecord)
        except MissingObjectError:
            return None

    def write_session(self, record: SessionRecord) -> None:
        self._store.write_record(self._session_key, record)

    def append(self, call: Call, turn: Turn | None) -> None:
        """Keep a call. The turn goes first: a turn without its call is ignored, but a call without
        its turn could not be gone on from.

        Raises:
            StorageError: the store is full or refuses.
        """
        if self._calls is None or self._turns is None:
            self._calls = Journal(self._store, self._calls_prefix)
            self._turns = Journal(self._store, self._turns_prefix)
        if turn is not None:
            self._turns.append([encode(turn)])
        self._calls.append([encode(call)])

    def close(self) -> None:
        for journal in (self._calls, self._turns):
            if journal is not None:
                journal.close()

    def read(self) -> list[tuple[Call, Turn | None]]:
        """All calls in the order in which they were recorded, with their turns."""
        turns = [
            decode(line, Turn, self._turns_prefix)
            for line in read_journal(self._store, self._turns_prefix)
        ]
        by_call = {turn.call_id: turn for turn in turns}
        calls = [
            decode(line, Call, self._calls_prefix)
            for line in read_journal(self._store, self._calls_prefix)
        ]
        return [(call, by_call.get(call.call_id)) for call in calls]


def rebuild(recorded: list[tuple[Call, Turn | None]]) -> Branches:
    """The tree of calls as it was when the last of them was recorded."""
    branches = Branches()
    nodes: dict[str, Node] = {}
    for call, turn in recorded:  # a call always follows the one that it goes on from
        if turn is None or call.status is not CallStatus.COMPLETE:
            continue
        parent = nodes[call.parent] if call.parent is not None else None
        node = Node(
            call_id=call.call_id,
            agent=call.agent,
            parent=parent,
            kept=call.kept,
            new_ids=array("i", call.new_ids),
            output_ids=array("i", call.output_ids),
            messages=turn.messages,
            reply=turn.reply,
            tools=turn.tools,
            depth=(parent.depth if parent else 0) + len(turn.messages) + 1,
        )
        nodes[call.call_id] = node
        branches.add(node)
    return branches
