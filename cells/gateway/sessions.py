"""Executions that are open at the gateway."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from cells.gateway.forms import RefusedError
from cells.gateway.matching import Branches
from cells.gateway.recording import ExecutionLog, SessionRecord, rebuild
from cells.gateway.routing import Places
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Call

CLOSE_LIMIT_S = 10.0


class Abandonable(Protocol):
    """A running call whose client is gone."""

    def abandon(self) -> None: ...


class WaitClock:
    """Time during which at least one call of an execution had no cell."""

    def __init__(self, waited_s: float = 0.0) -> None:
        self._total = waited_s
        self._waiting = 0
        self._since = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self._waiting == 0:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._total += time.monotonic() - self._since

    def waited_s(self) -> float:
        running = time.monotonic() - self._since if self._waiting else 0.0
        return self._total + running


class Session:
    """One open execution: its key, its calls, and what runs now."""

    def __init__(
        self,
        record: SessionRecord,
        log: ExecutionLog,
        branches: Branches,
        recorded: list[Call],
    ) -> None:
        self.record = record
        self.log = log
        self.branches = branches
        self.calls = len(recorded)
        """Recorded calls."""
        self.clock = WaitClock(sum(call.waited_s for call in recorded))
        self.running: dict[Abandonable, asyncio.Task[object]] = {}
        self.closing = False
        self._arrived = max((call.index + 1 for call in recorded), default=0)

    @property
    def execution_id(self) -> str:
        return self.record.execution_id

    def next_call(self) -> tuple[str, int]:
        """Identifier and index of a call that arrives now. The random end keeps apart calls of
        which a killed gateway recorded nothing."""
        index = self._arrived
        self._arrived += 1
        return f"{self.execution_id}-c{index:04d}-{secrets.token_hex(3)}", index

    def check(self, key: str) -> None:
        """Refuse a wrong key.

        Raises:
            RefusedError: 401.
        """
        if not secrets.compare_digest(key.encode(), self.record.api_key.encode()):
            raise _wrong_key()


@dataclass(frozen=True, slots=True)
class Closed:
    """What is left of a closed execution."""

    api_key: str
    calls: int
    waited_s: float


class Sessions:
    """Opens, finds and closes executions."""

    def __init__(self, store: Store, layout: RunLayout, places: Places) -> None:
        self._store = store
        self._layout = layout
        self._places = places
        self.open: dict[str, Session] = {}
        self.closed: dict[str, Closed] = {}
        self._lock = asyncio.Lock()

    def find(self, execution_id: str, key: str) -> Session:
        """The open session of an execution.

        Raises:
            RefusedError: 401 for a wrong key or an unknown execution (which of the two is not
                told), 410 after its end.
        """
        session = self.open.get(execution_id)
        if session is not None and not session.closing:
            session.check(key)
            return session
        known = session.record.api_key if session else None
        if execution_id in self.closed:
            known = self.closed[execution_id].api_key
        if known is None or not secrets.compare_digest(key.encode(), known.encode()):
            raise _wrong_key()
        raise RefusedError(410, "execution_closed", f"execution {execution_id} has ended")

    async def start(self, execution_id: str, temperature: float, version: int) -> Session:
        """Open an execution, or go on with it where storage knows it.

        Raises:
            StorageError, RecordError: what is stored can't be read, or nothing can be written.
        """
        async with self._lock:
            session = self.open.get(execution_id)
            if session is None:
                session = await asyncio.to_thread(self._load, execution_id, temperature, version)
                self.open[execution_id] = session
                self.closed.pop(execution_id, None)
            return session

    async def end(self, execution_id: str) -> Closed | None:
        """Stop what runs (recorded as abandoned), close the journal, free the place. None for an
        execution that was never open here."""
        async with self._lock:
            session = self.open.get(execution_id)
            if session is None:
                return self.closed.get(execution_id)
            await _stop(session)
            self._places.release(execution_id)
            closed = session.record.model_copy(update={"closed": True})
            await asyncio.to_thread(session.log.write_session, closed)
            await asyncio.to_thread(session.log.close)
            del self.open[execution_id]
            left = Closed(closed.api_key, session.calls, session.clock.waited_s())
            self.closed[execution_id] = left
            return left

    async def close(self) -> None:
        """Stop everything that runs; executions stay open in storage, for the next gateway."""
        await asyncio.gather(*(_stop(session) for session in self.open.values()))
        for session in self.open.values():
            await asyncio.to_thread(session.log.close)

    def _load(self, execution_id: str, temperature: float, version: int) -> Session:
        log = ExecutionLog(self._store, self._layout, execution_id)
        known = log.session()
        record = SessionRecord(
            execution_id=execution_id,
            api_key=known.api_key if known else secrets.token_urlsafe(24),
            temperature=temperature,
            policy_version=version,
            closed=False,
        )
        if record != known:
            log.write_session(record)
        recorded = log.read() if known else []
        return Session(record, log, rebuild(recorded), [call for call, _ in recorded])


async def _stop(session: Session) -> None:
    session.closing = True
    running = dict(session.running)
    for call in running:
        call.abandon()
    if running:
        await asyncio.wait(running.values(), timeout=CLOSE_LIMIT_S)


def _wrong_key() -> RefusedError:
    return RefusedError(401, "invalid_api_key", "wrong API key for this execution")
