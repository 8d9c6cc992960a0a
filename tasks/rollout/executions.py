"""The executions of a host: queued, running, ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from storage.objects import MissingObjectError, StorageError
from storage.records import ExecutionResult, ExecutionSpec, RecordError
from storage.run import Run
from tasks.rollout.execution import Surroundings, carry_out

_STORE_PATIENCE_S = 120.0
_SHUTDOWN_PATIENCE_S = 1.0
_log = logging.getLogger(__name__)


class State(StrEnum):
    """Where an execution is. ``unknown``: this host never heard of it and storage has no result."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass
class Entry:
    """An execution that this host knows."""

    state: State = State.QUEUED
    result: ExecutionResult | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    finish: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its time is up for a reason of its owner's."""

    def view(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"state": self.state.value}
        if self.result is not None:
            answer["result"] = self.result.model_dump(mode="json")
        return answer


class Executions:
    """Executions by id. At most ``rollout.concurrent`` run at once, others wait in their order.

    An execution whose result is in storage has ended, whoever ran it; one that was under way when
    an earlier host was killed is run anew when it is submitted again.
    """

    def __init__(self, run: Run, around: Surroundings) -> None:
        self._run = run
        self._around = around
        self._entries: dict[str, Entry] = {}
        self._places = asyncio.Semaphore(run.config.rollout.concurrent)
        self._watching = asyncio.create_task(around.sessions.watch())

    async def submit(self, spec: ExecutionSpec) -> State:
        """Take an execution, unless it is known or has ended before.

        One whose result was taken out of storage is run anew.
        """
        entry = await self.find(spec.execution_id)
        if entry is not None and entry.state is State.ENDED and not await self._stored(spec):
            self._entries.pop(spec.execution_id, None)
            entry = None
        if entry is None:
            entry = self._entries[spec.execution_id] = Entry()
            entry.task = asyncio.create_task(self._carry_out(spec, entry))
            entry.task.add_done_callback(lambda _: self._settle(spec.execution_id, entry))
        return entry.state

    async def find(self, execution: str) -> Entry | None:
        """What is known of an execution, here or in storage."""
        if execution not in self._entries:
            with suppress(MissingObjectError):
                key = self._run.layout.execution_result(execution)
                result = await asyncio.to_thread(self._run.store.read_record, key, ExecutionResult)
                entry = Entry(State.ENDED, result)
                entry.ended.set()
                self._entries.setdefault(execution, entry)
        return self._entries.get(execution)

    async def any_ended(self, names: Iterable[str], wait_s: float) -> dict[str, State]:
        """Where these executions are, as soon as one has ended or is not known, or after a time."""
        entries = {name: await self.find(name) for name in names}
        known = [entry for entry in entries.values() if entry is not None]
        if len(known) == len(entries) and not any(entry.ended.is_set() for entry in known):
            waits = [asyncio.create_task(entry.ended.wait()) for entry in known]
            try:
                await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return {
            name: State.UNKNOWN if entry is None else entry.state for name, entry in entries.items()
        }

    async def _stored(self, spec: ExecutionSpec) -> bool:
        key = self._run.layout.execution_result(spec.execution_id)
        return await asyncio.to_thread(self._run.store.exists, key)

    async def drop(self, execution: str) -> State:
        """End the harness of an execution that runs or waits, without a result."""
        entry = await self.find(execution)
        if entry is None:
            return State.UNKNOWN
        if entry.task is not None and not entry.task.done():
            entry.task.cancel()
            await asyncio.wait([entry.task])
        return State.UNKNOWN if entry.result is None else State.ENDED

    async def finish(self, execution: str) -> State:
        """End an execution as if its time were up: what it leaves is frozen and kept. One that has
        not begun becomes a failure of our side."""
        entry = await self.find(execution)
        if entry is None:
            return State.UNKNOWN
        entry.finish.set()
        return entry.state

    def count(self) -> dict[str, int]:
        """How many executions are in which state."""
        found = Counter(entry.state for entry in self._entries.values())
        return {state.value: found[state] for state in (State.QUEUED, State.RUNNING, State.ENDED)}

    async def close(self) -> None:
        """End every harness. Executions that have not ended leave no result."""
        self._watching.cancel()
        self._around.sessions.patience_s = _SHUTDOWN_PATIENCE_S
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._around.sessions.close_client()
        await self._around.doors.close()

    async def _carry_out(self, spec: ExecutionSpec, entry: Entry) -> None:
        async with self._places:
            entry.state = State.RUNNING
            result = await carry_out(spec, self._around, entry.finish)
            try:
                entry.result = await self._keep(result)
            except (StorageError, RecordError):
                _log.exception("%s: its result can't be kept", spec.execution_id)

    def _settle(self, execution: str, entry: Entry) -> None:
        """Once its task has ended in whatever way, also before it began."""
        if entry.result is None:
            entry.state = State.UNKNOWN
            self._entries.pop(execution, None)
        else:
            entry.state = State.ENDED
        entry.ended.set()

    async def _keep(self, result: ExecutionResult) -> ExecutionResult:
        """Write a result once and return the one that is stored."""
        store, key = self._run.store, self._run.layout.execution_result(result.execution_id)
        deadline = time.monotonic() + _STORE_PATIENCE_S
        pause = 0.2
        while True:
            try:
                if await asyncio.to_thread(store.write_record_once, key, result):
                    return result
                return await asyncio.to_thread(store.read_record, key, ExecutionResult)
            except StorageError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, 10.0)
