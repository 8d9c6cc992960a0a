"""Executions that are open at the gateway."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from cells.gateway.canonical import tools_key
from cells.gateway.forms import RefusedError, Tool
from cells.gateway.matching import Branches
from cells.gateway.recording import (
    ExecutionLog,
    SessionRecord,
    Turn,
    rebuild,
    recorded_reply,
    unsettled,
)
from cells.gateway.resends import Resends
from cells.gateway.rest import Drawer
from cells.gateway.routing import Places
from cells.gateway.seen import Seen
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Call

CLOSE_LIMIT_S = 10.0
EXECUTION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Abandonable(Protocol):
    """A running call that can be given up."""

    def abandon(self, why: RefusedError | None = None) -> None: ...


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
        return self._total + self.waits_s()

    def waits_s(self) -> float:
        """Since when it has been waiting now, in seconds; 0 where it is not."""
        return time.monotonic() - self._since if self._waiting else 0.0


class Session:
    """One open execution: its key, its calls, and what runs now."""

    def __init__(
        self,
        record: SessionRecord,
        log: ExecutionLog,
        recorded: list[tuple[Call, Turn | None]],
    ) -> None:
        calls = [call for call, _ in recorded]
        self.record = record
        self.log = log
        # Counted from here on: a clock that is set must not end what runs.
        self._expires = time.monotonic() + record_life_s(record)
        self._drawer = Drawer(rebuild(recorded))
        self.calls = len(calls)
        """Recorded calls."""
        self.clock = WaitClock(sum(call.waited_s for call in calls))
        self.running: dict[Abandonable, asyncio.Task[object]] = {}
        self.closing = False
        self.resends = Resends()
        self.seen = Seen()
        self._arrived = max((call.index + 1 for call in calls), default=0)
        self._tools: tuple[list[Tool], str] = [], ""
        self._unsettled = unsettled(recorded)

    @property
    def execution_id(self) -> str:
        return self.record.execution_id

    @property
    def branches(self) -> Branches:
        """The recorded calls, as later requests find them."""
        return self._drawer.open()

    async def rest(self, after_s: float) -> bool:
        """Keep less, if nothing runs and nobody asked for so long; whether that was so."""
        if self.running or not self._drawer.is_idle(after_s):
            return False
        self.seen = Seen()  # the next request is read whole
        return await self._drawer.pack()

    def next_call(self) -> tuple[str, int]:
        """Identifier and index of a call that arrives now. The random end keeps apart calls of
        which a killed gateway recorded nothing."""
        index = self._arrived
        self._arrived += 1
        return f"{self.execution_id}-c{index:04d}-{secrets.token_hex(3)}", index

    def restore(self) -> None:
        """Keep recorded answers for clients that may ask again; runs in the event loop."""
        for call, turn in self._unsettled:
            self.resends.restore(call.agent, turn.request, call.call_id, recorded_reply(call, turn))
        self._unsettled = []

    def tools_key(self, tools: list[Tool]) -> str:
        """The name of these tools; they are mostly those of the last request.

        Raises:
            ValueError: they are nested too deeply.
        """
        known, key = self._tools
        if tools != known:
            key = tools_key(tools)
            self._tools = tools, key
        return key

    @property
    def life_s(self) -> float:
        """Seconds until its key expires."""
        return self._expires - time.monotonic()

    def renew(self, record: SessionRecord) -> None:
        """Go on with a record that expires later."""
        self.record = record
        self._expires = time.monotonic() + record_life_s(record)

    def check(self, key: str) -> None:
        """Refuse a wrong key, or one that has expired.

        Raises:
            RefusedError: 401.
        """
        if not secrets.compare_digest(key.encode(), self.record.api_key.encode()):
            raise _wrong_key()
        if self.life_s <= 0:
            raise RefusedError(401, "expired_api_key", "this key has expired (gateway.key_life_s)")


def record_life_s(record: SessionRecord) -> float:
    """Seconds from now until the key of a record expires."""
    return math.inf if record.expires_at is None else record.expires_at - time.time()


@dataclass(frozen=True, slots=True)
class Closed:
    """What is left of a closed execution."""

    api_key: str
    calls: int
    waited_s: float


class Sessions:
    """Opens, finds and closes executions.

    Args:
        key_life_s: how long a key is good after its execution was opened, or opened again.
    """

    def __init__(
        self, store: Store, layout: RunLayout, places: Places, key_life_s: float = math.inf
    ) -> None:
        self._key_life_s = key_life_s
        self._store = store
        self._layout = layout
        self._places = places
        self.open: dict[str, Session] = {}
        self.closed: dict[str, Closed] = {}
        # One for each execution that is being opened or closed just now: closing can wait for
        # aborts, and the others must not.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stopping = False

    def find(self, execution_id: str, key: str) -> Session:
        """The open session of an execution.

        Raises:
            RefusedError: 401 for a wrong key or an unknown execution (which of the two is not
                told), or a key that has expired; 410 after its end, 503 while this gateway stops.
        """
        if self._stopping:
            raise _stopping()
        session = self.open.get(execution_id)
        if session is not None and not session.closing:
            session.check(key)
            return session
        known = session.record.api_key if session else None
        if execution_id in self.closed:
            known = self.closed[execution_id].api_key
        if known is None or not secrets.compare_digest(key.encode(), known.encode()):
            raise _wrong_key()
        raise _ended()

    async def recover(self, execution_id: str) -> None:
        """Take up an execution that an earlier gateway had, if storage knows one: its client only
        tries again, whoever opened it need not.

        Raises:
            StorageError, RecordError: what is stored can't be read.
        """
        if execution_id in self.open or execution_id in self.closed or self._stopping:
            return
        if not EXECUTION_ID.fullmatch(execution_id):
            return
        log = ExecutionLog(self._store, self._layout, execution_id)
        known = await asyncio.to_thread(log.session)
        if known is None:
            return
        if not known.closed:
            await self._start(
                execution_id, known.temperature, known.policy_version, known.newer, renew=False
            )
            return
        calls = [call for call, _ in await asyncio.to_thread(log.read)]
        waited = sum(call.waited_s for call in calls)
        self.closed.setdefault(execution_id, Closed(known.api_key, len(calls), waited))

    async def start(
        self, execution_id: str, temperature: float, version: int, newer: bool = False
    ) -> Session:
        """Open an execution, or go on with it where storage knows it, and renew its key's life.

        Args:
            version: of the weights that may serve it; with ``newer`` the oldest of these.

        Raises:
            StorageError, RecordError: what is stored can't be read, or nothing can be written.
        """
        return await self._start(execution_id, temperature, version, newer, renew=True)

    def longest_wait_s(self) -> float:
        """Of the calls that wait now, in seconds."""
        return max((session.clock.waits_s() for session in self.open.values()), default=0.0)

    async def _start(
        self, execution_id: str, temperature: float, version: int, newer: bool, *, renew: bool
    ) -> Session:
        async with self._lock(execution_id):
            session = self.open.get(execution_id)
            if session is None:
                session = await asyncio.to_thread(
                    self._load, execution_id, temperature, version, newer, renew
                )
                session.restore()
                self.open[execution_id] = session
                self.closed.pop(execution_id, None)
            elif renew and session.life_s < self._key_life_s / 2:
                record = session.record.model_copy(update={"expires_at": self._expiry()})
                await asyncio.to_thread(session.log.write_session, record)
                session.renew(record)
            return session

    async def end(self, execution_id: str) -> Closed | None:
        """Stop what runs (recorded as abandoned), close the journal, free the place. None for an
        execution that was never open here."""
        async with self._lock(execution_id):
            session = self.open.get(execution_id)
            if session is None:
                return self.closed.get(execution_id)
            await _stop(session, _ended())
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
        self._stopping = True
        await asyncio.gather(*(_stop(session, _stopping()) for session in self.open.values()))
        for execution_id in list(self.open):  # some may end meanwhile, as their host stops too
            async with self._lock(execution_id):
                if session := self.open.get(execution_id):
                    await asyncio.to_thread(session.log.close)

    def _lock(self, execution_id: str) -> asyncio.Lock:
        lock = self._locks.get(execution_id)
        if lock is None:
            self._locks[execution_id] = lock = asyncio.Lock()
        return lock

    def _expiry(self) -> float | None:
        """Of a key that is given or renewed now."""
        return time.time() + self._key_life_s if self._key_life_s < math.inf else None

    def _load(
        self, execution_id: str, temperature: float, version: int, newer: bool, renew: bool
    ) -> Session:
        log = ExecutionLog(self._store, self._layout, execution_id)
        known = log.session()
        record = SessionRecord(
            execution_id=execution_id,
            api_key=known.api_key if known else secrets.token_urlsafe(24),
            temperature=temperature,
            policy_version=version,
            closed=False,
            expires_at=self._expiry() if renew or known is None else known.expires_at,
            newer=newer,
        )
        if record != known:
            log.write_session(record)
        return Session(record, log, log.read() if known else [])


async def _stop(session: Session, why: RefusedError) -> None:
    session.closing = True
    running = dict(session.running)
    for call in running:
        call.abandon(why)
    if running:
        await asyncio.wait(running.values(), timeout=CLOSE_LIMIT_S)


def _wrong_key() -> RefusedError:
    return RefusedError(401, "invalid_api_key", "wrong API key for this execution")


def _ended() -> RefusedError:
    return RefusedError(410, "execution_closed", "this execution has ended")


def _stopping() -> RefusedError:
    return RefusedError(503, "stopping", "the gateway stops; try again", retry_after_s=2)
