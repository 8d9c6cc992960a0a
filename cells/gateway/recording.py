"""What is kept of every call, so that it can be trained on and a restarted gateway can go on."""

from __future__ import annotations

import asyncio
import queue
import struct
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cells.gateway.forms import Finish, Reply, ToolCall, Usage
from cells.gateway.matching import Branches, Node, cut_node, leave_out
from storage.journal import Journal, read_journal
from storage.layout import RunLayout
from storage.objects import MissingObjectError, Store
from storage.records import Call, CallStatus, Record, decode, encode_finite

_LANES = 32
SLOW_S = 0.02
"""A write that takes longer would hold up every other answer."""
CAREFUL_S = 30.0


class SessionRecord(Record):
    """How an execution was opened."""

    execution_id: str
    api_key: str
    temperature: float
    policy_version: int
    closed: bool
    expires_at: float | None = None
    """Until when the key is good, in seconds since the epoch; records of an older version have no
    such time."""
    newer: bool = False
    """Cells with weights newer than ``policy_version`` may serve it as well."""


class Turn(Record):
    """The messages of a call: what its request added to its parent's history, and the reply, or
    what was sent of it. Only the matching of later requests needs them; ids are in the call."""

    call_id: str
    messages: tuple[dict[str, Any], ...]
    reply: dict[str, Any]
    tools: str
    request: str = ""
    """Name that equal requests share."""
    kept_text: str | None = None
    """What its client kept of the parent's answer, where that is not all; empty when it left out
    an empty one."""
    prompt_tokens: int = 0
    stop_text: str | None = None


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

    @property
    def is_quick(self) -> bool:
        """Whether a write is an addition to files that are open, which a file system takes into
        memory."""
        return self._calls is not None and self._turns is not None and not self.waits

    @property
    def waits(self) -> bool:
        """Whether each write is a question to a store and the wait for its answer."""
        return not self._store.is_local

    def append(self, call: bytes, turn: bytes | None) -> None:
        """Keep an encoded call. The turn goes first: a turn without its call is ignored, but a call
        without its turn could not be gone on from.

        Raises:
            StorageError: the store is full or refuses.
        """
        if self._calls is None or self._turns is None:
            self._calls = Journal(self._store, self._calls_prefix)
            self._turns = Journal(self._store, self._turns_prefix)
        if turn is not None:
            self._turns.append([turn])
        self._calls.append([call])

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


class Recorder:
    """Writes for all executions.

    What only adds to open files is written at once: to hand it to a thread, and to wake that and
    the event loop, costs ten times as much. When a write took long, as on a disk that others flood,
    a thread has them for a while. So it has all others always: while it writes, what comes in
    becomes its next batch, and the event loop is woken once for each batch. On an object store the
    executions of a batch are written side by side.
    """

    def __init__(self) -> None:
        self._careful_until = 0.0
        self._lanes = ThreadPoolExecutor(_LANES, thread_name_prefix="recorder")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    async def append(self, log: ExecutionLog, call: Call, turn: Turn | None) -> None:
        """Keep a call; when this returns, it survives this process.

        Raises:
            StorageError: the store is full or refuses.
        """
        # The log-probs were seen to be finite when they came.
        lines = encode_finite(call), encode_finite(turn) if turn is not None else None
        if log.is_quick and time.monotonic() >= self._careful_until:
            self._write_now(log, *lines)
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        done = self._loop.create_future()
        self._waiting.put((log, *lines, done))
        await asyncio.shield(done)  # whoever stops waiting does not stop the writing

    async def close(self) -> None:
        """Write what is left."""
        if self._loop is not None:
            self._waiting.put(None)
            await asyncio.to_thread(self._thread.join)
        self._lanes.shutdown()

    def _write_now(self, log: ExecutionLog, call: bytes, turn: bytes | None) -> None:
        start = time.monotonic()
        log.append(call, turn)
        end = time.monotonic()
        if end - start > SLOW_S:
            self._careful_until = end + CAREFUL_S

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            batch = [line]
            while not self._waiting.empty() and (line := self._waiting.get()) is not None:
                batch.append(line)
            outcomes = self._write(batch)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_tell, outcomes)
            if line is None:
                return

    def _write(self, batch: list[_Line]) -> list[_Outcome]:
        if not batch[0][0].waits:
            return _written(batch)
        logs: dict[ExecutionLog, list[_Line]] = {}
        for line in batch:
            logs.setdefault(line[0], []).append(line)
        return [outcome for row in self._lanes.map(_written, logs.values()) for outcome in row]


_Line = tuple[ExecutionLog, bytes, bytes | None, "asyncio.Future[None]"]
_Outcome = tuple["asyncio.Future[None]", Exception | None]


def _written(lines: list[_Line]) -> list[_Outcome]:
    """Write them in order."""
    return [(done, _failure(log, call, turn)) for log, call, turn, done in lines]


def _failure(log: ExecutionLog, call: bytes, turn: bytes | None) -> Exception | None:
    try:
        log.append(call, turn)
    except Exception as error:  # noqa: BLE001  (whoever waits gets it)
        return error
    return None


def _tell(outcomes: list[_Outcome]) -> None:
    for done, error in outcomes:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def rebuild(recorded: list[tuple[Call, Turn | None]]) -> Branches:
    """The tree of calls as it was when the last of them was recorded."""
    branches = Branches()
    nodes: dict[str, Node] = {}
    for call, turn in recorded:  # a call always follows the one that it goes on from
        if turn is None:
            continue
        parent = nodes[call.parent] if call.parent is not None else None
        if parent is not None and turn.kept_text == "":
            parent = leave_out(parent)
        elif parent is not None and turn.kept_text is not None:
            prompt = parent.length - len(parent.output_ids)
            kept = {"role": "assistant", "content": turn.kept_text}
            parent = cut_node(parent, call.kept - prompt, kept)
        node = make_node(call, turn, parent)
        nodes[call.call_id] = node
        if call.status is CallStatus.COMPLETE:
            branches.add(node)
        else:
            branches.add_abandoned(node)
    return branches


def make_node(call: Call, turn: Turn, parent: Node | None) -> Node:
    """The place of a recorded call in the tree."""
    return Node(
        call_id=call.call_id,
        agent=call.agent,
        parent=parent,
        kept=call.kept,
        new_ids=_packed(call.new_ids),
        output_ids=_packed(call.output_ids),
        messages=turn.messages,
        reply=turn.reply,
        tools=turn.tools,
        depth=(parent.depth if parent else 0) + len(turn.messages) + 1,
        length=call.kept + len(call.new_ids) + len(call.output_ids),
    )


def _packed(ids: tuple[int, ...]) -> array[int]:
    """In two steps, each of which is faster than an array is at taking numbers one by one."""
    return array("i", struct.pack(f"{len(ids)}i", *ids))


def unsettled(recorded: list[tuple[Call, Turn | None]]) -> list[tuple[Call, Turn]]:
    """Answers that nobody knows to be delivered: no later call of their agent began after them."""
    begun: dict[str, float] = {}
    for call, _ in recorded:
        begun[call.agent] = max(begun.get(call.agent, 0.0), call.started_at)
    return [
        (call, turn)
        for call, turn in recorded
        if turn is not None
        and call.status is CallStatus.COMPLETE
        and begun[call.agent] < call.started_at + call.seconds
    ]


def recorded_reply(call: Call, turn: Turn) -> Reply:
    """The answer of a recorded call."""
    calls = turn.reply.get("tool_calls", ())
    return Reply(
        call_id=call.call_id,
        content=turn.reply["content"],
        reasoning=turn.reply.get("reasoning_content"),
        tool_calls=tuple(
            ToolCall(one["id"], one["function"]["name"], one["function"]["arguments"])
            for one in calls
        ),
        finish=Finish(call.finish_reason),
        usage=Usage(turn.prompt_tokens, call.cached_tokens, len(call.output_ids)),
        stop_text=turn.stop_text,
    )
