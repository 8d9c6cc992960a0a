"""Daemons that end while their run needs them are started again, within a budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from cells.client import DaemonClient, DaemonError
from cells.daemon import this_machine
from cells.launch import DaemonSpec, LeaseKeeper, StartError, ensure_daemons
from storage.layout import RunLayout
from storage.objects import Store

BUDGET = 5
"""Restarts of one daemon within ``WINDOW_S``; one more would help as little."""
WINDOW_S = 1800.0
FIRST_PAUSE_S = 1.0
"""Before the first restart in a window; it doubles with each further one."""
WINDOW_PAUSES_S = FIRST_PAUSE_S * (2**BUDGET - 1)
"""All pauses of a window together."""
WATCH_S = 1.0
_ASK_LIMIT_S = 5.0


@dataclass
class _Past:
    """What happened to one daemon."""

    restarts: list[float] = field(default_factory=list)
    """When, on the monotonic clock."""
    gone_since: float | None = None
    given_up: bool = False
    start: Future[None] | None = None
    """Under way; None while none is."""


class Warden:
    """A thread that looks after the daemons that were started on this machine.

    A daemon whose process has ended, and the host of a cell that has failed for ever, is started
    again; the client that everybody holds then leads to the new one. One on another machine is
    started again by whoever started it there.

    Args:
        specs: asked before each restart: how the daemons are to be started now.
        clients: by name; they are changed in place.
    """

    def __init__(
        self,
        store: Store,
        layout: RunLayout,
        *,
        specs: Callable[[], Sequence[DaemonSpec]],
        clients: Mapping[str, DaemonClient],
        keeper: LeaseKeeper,
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._layout = layout
        self._specs = specs
        self._clients = dict(clients)
        self._keeper = keeper
        self._say = say
        self._past = {name: _Past() for name in clients}
        self._closed = threading.Event()
        self._changed = threading.Condition()
        # One that takes long to start must not hold up the others.
        self._starts = ThreadPoolExecutor(max(1, len(clients)), thread_name_prefix="restart")
        self._thread = threading.Thread(target=self._run, name="warden", daemon=True)
        self._thread.start()

    def close(self, limit_s: float = 30.0) -> None:
        """Start nothing more. A start under way is given up, and what it began is ended."""
        deadline = time.monotonic() + limit_s
        self._closed.set()
        self._thread.join(limit_s)
        for past in self._past.values():
            if past.start is not None:
                wait([past.start], max(0.0, deadline - time.monotonic()))
        self._starts.shutdown(wait=False, cancel_futures=True)

    def losses(self) -> int:
        """How often any daemon was started again."""
        with self._changed:
            return sum(len(past.restarts) for past in self._past.values())

    def lost_since(self, losses: int, limit_s: float) -> bool:
        """Whether a daemon was lost since ``losses`` was read, or within ``limit_s`` from now: who
        is hit by a loss may see it before this does."""
        deadline = time.monotonic() + limit_s
        while True:
            awaited = [name for name, past in self._past.items() if not past.given_up]
            if self.losses() > losses or not all(map(self.well, awaited)):
                return True
            if time.monotonic() > deadline:
                return False
            with self._changed:
                self._changed.wait(WATCH_S)

    def restarts(self, name: str) -> int:
        """How often a daemon was started again."""
        with self._changed:
            return len(self._past[name].restarts)

    def wait_well(self, name: str, limit_s: float) -> None:
        """Until the daemon lives, in the present process or in a new one.

        Raises:
            StartError: not within ``limit_s``, or its budget is spent.
        """
        deadline = time.monotonic() + limit_s
        while not self.well(name):
            left_s = deadline - time.monotonic()
            if self._past[name].given_up or left_s <= 0:
                raise StartError(
                    f"{name} has ended and did not come back: {len(self._past[name].restarts)} "
                    f"restarts; its log says why"
                )
            with self._changed:
                self._changed.wait(min(WATCH_S, left_s))

    def _run(self) -> None:
        while not self._closed.wait(WATCH_S):
            for name, past in self._past.items():
                if self._closed.is_set():
                    return
                if past.start is not None and not past.start.done():
                    continue
                past.start = None
                if past.given_up or self.well(name):
                    past.gone_since = None
                    continue
                self._see_to(name, past)
            with self._changed:
                self._changed.notify_all()

    def well(self, name: str) -> bool:
        """Whether its process runs and it has not failed for ever. Silence is not death: a daemon
        that is slow is left to those who wait for it, with deadlines of their own."""
        client = self._clients[name]
        registration = client.registration
        if registration.machine != this_machine():
            return True
        with suppress(psutil.Error):
            if psutil.Process(registration.pid).status() == psutil.STATUS_ZOMBIE:
                return False
            if registration.kind != "cell":
                return True
            with suppress(DaemonError):
                status = client.call("GET", "/status", limit_s=_ASK_LIMIT_S)
                return bool(status["role"] != "failed")
            return True
        return False

    def _see_to(self, name: str, past: _Past) -> None:
        now = time.monotonic()
        if past.gone_since is None:
            past.gone_since = now
        recent = [at for at in past.restarts if now - at < WINDOW_S]
        if len(recent) >= BUDGET:
            past.given_up = True
            self._say(
                f"{name} has ended {BUDGET + 1} times within {WINDOW_S / 60:g} minutes: it is not "
                f"started again"
            )
            return
        if now - past.gone_since < FIRST_PAUSE_S * 2 ** len(recent):
            return
        with self._changed:
            past.restarts.append(now)
        past.gone_since = None
        past.start = self._starts.submit(self._start, name, len(recent) + 1)

    def _start(self, name: str, number: int) -> None:
        """In a thread of its own."""
        try:
            spec = next(one for one in self._specs() if one.name == name)
            if spec.elsewhere:  # whoever started it there does so again
                with self._changed:
                    self._past[name].restarts.pop()
                return
            self._say(f"{name} has ended: started again, {number} of {BUDGET} times")
            found = ensure_daemons(
                self._store, self._layout, [spec], self._keeper, self._say, self._is_open
            )
        except (RuntimeError, OSError, ValueError, LookupError) as error:
            self._say(f"{name} was not started again: {error}")
            return
        self._clients[name].become(found[name].registration)

    def _is_open(self) -> bool:
        return not self._closed.is_set()
