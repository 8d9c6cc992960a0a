"""Starting the daemons of a run on this machine, adopting those that live, keeping their leases."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from cells.client import DaemonClient, DaemonError, DaemonGoneError
from cells.daemon import this_machine
from cells.host.exports import remove_abandoned
from cells.lag import ALARM_S
from cells.process import end_group, spawn
from cells.reason import exit_words, last_line, log_since, log_size, reason
from storage.layout import RunLayout
from storage.objects import Store

RENEWALS_PER_LEASE = 6
FAILED_GRACE_S = 15.0
STARTS = 2
"""Of a daemon that ends before it is ready: what was an accident is none the second time."""
_POLL_S = 0.1
_END_POLL_S = 0.05
_WATCH_S = 0.5
_ALARM_EVERY_S = 300.0


@dataclass(frozen=True)
class DaemonSpec:
    """How a daemon is started when none is there.

    Args:
        elsewhere: the command that starts it on another machine; here it is only waited for.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    start_limit_s: float
    elsewhere: str | None = None


class StartError(RuntimeError):
    """A daemon did not start; the text holds the cause from its log, and where that is."""


class _EndedError(StartError):
    """It has ended before it was ready."""


class LeaseKeeper:
    """A thread that renews the leases of daemons until it is closed.

    Args:
        alarm: told, from that thread, of a daemon whose event loop was behind.
    """

    def __init__(self, lease_s: float, alarm: Callable[[str], None] = lambda _: None) -> None:
        self._alarm = alarm
        self._alarmed: dict[str, float] = {}
        self._clients: list[DaemonClient] = []
        self._every_s = lease_s / RENEWALS_PER_LEASE
        self._parent = os.getppid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def add(self, client: DaemonClient) -> None:
        """Renew this daemon's lease too."""
        self._clients.append(client)

    def clients(self) -> list[DaemonClient]:
        """The daemons whose leases it renews."""
        return list(self._clients)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            if os.getppid() != self._parent:
                # Whoever started this flow was killed and nobody can see or stop it any more.
                os.kill(os.getpid(), signal.SIGTERM)
                return
            for client in tuple(self._clients):
                # A daemon that is gone is noticed by whoever needs it, with a better reason.
                with suppress(DaemonError, ValueError):
                    self._look_at(client.name, client.renew())

    def _look_at(self, name: str, lag_s: float) -> None:
        """Say it of each daemon once in a while: what is too slow is so for long."""
        now = time.monotonic()
        if lag_s > ALARM_S and now - self._alarmed.get(name, -math.inf) > _ALARM_EVERY_S:
            self._alarmed[name] = now
            self._alarm(
                f"{name}: its event loop was {lag_s:.1f} s behind: something blocks it, or the "
                f"machine has too few cores for what runs"
            )


def is_renewed(client: DaemonClient, lease_s: float) -> bool:
    """Whether somebody renews this daemon's lease, seen by its getting longer.

    Watches for one and a half times the pause between renewals, less when it is gone.
    """
    deadline = time.monotonic() + 1.5 * lease_s / RENEWALS_PER_LEASE
    left_s = math.inf
    while time.monotonic() < deadline:
        try:
            seen_s = float(client.call("GET", "/healthz", limit_s=5)["lease_left_s"])
        except DaemonError:
            return False
        if seen_s > left_s:
            return True
        left_s = seen_s
        time.sleep(_WATCH_S)
    return False


@dataclass(frozen=True)
class _Started:
    """A daemon of which nothing was heard yet."""

    spec: DaemonSpec
    process: subprocess.Popen[bytes]
    log: Path
    logged: int
    """Bytes that its log held before."""
    deadline: float
    number: int
    """Of its starts, from one."""


@dataclass(frozen=True)
class _Awaited:
    """A daemon that is started elsewhere, of which nothing was heard yet."""

    spec: DaemonSpec
    deadline: float


def ensure_daemons(
    store: Store,
    layout: RunLayout,
    specs: Sequence[DaemonSpec],
    keeper: LeaseKeeper,
    say: Callable[[str], None],
    wanted: Callable[[], bool] = lambda: True,
) -> dict[str, DaemonClient]:
    """A client of each daemon, adopted where it lives, started where it does not, in parallel.

    Args:
        keeper: renews each lease from the moment that its daemon is found, as others may take
            longer to start than a lease lasts.
        wanted: asked while some are not ready: whether they are needed still.

    Raises:
        StartError: one ended twice before it was ready, or did not register in time, or they are
            needed no longer. What was started here is ended.
    """
    clients: dict[str, DaemonClient] = {}
    started: list[_Started] = []
    awaited: list[_Awaited] = []
    try:
        with ThreadPoolExecutor(len(specs)) as pool:  # one that hangs must not hold up the others
            found = list(pool.map(partial(_adopt, store, layout), [spec.name for spec in specs]))
        for spec, adopted in zip(specs, found, strict=True):
            if adopted is not None:
                say(f"{spec.name}: adopted, pid {adopted.registration.pid}")
                clients[spec.name] = adopted
                keeper.add(adopted)
            elif spec.elsewhere:
                say(f"{spec.name}: waiting for the machine that shall start it")
                awaited.append(_Awaited(spec, time.monotonic() + spec.start_limit_s))
            else:
                _end_unregistered(store, layout, spec)
                started.append(_start(store, layout, spec))
        waiting: list[_Started | _Awaited] = [*started, *awaited]
        while waiting:
            for daemon in tuple(waiting):
                if isinstance(daemon, _Started):
                    try:
                        client = _ready(store, layout, daemon)
                    except _EndedError as error:
                        if daemon.number >= STARTS:
                            raise
                        say(f"{error}\n{daemon.spec.name} is started once more")
                        end_group(daemon.process.pid, grace_s=5)
                        started.append(_start(store, layout, daemon.spec, daemon.number + 1))
                        waiting[waiting.index(daemon)] = started[-1]
                        continue
                else:
                    client = _arrived(store, layout, daemon)
                if client is not None:
                    waiting.remove(daemon)
                    clients[daemon.spec.name] = client
                    keeper.add(client)
                    say(f"{daemon.spec.name}: ready at {client.url}")
            if waiting and not wanted():
                names = ", ".join(daemon.spec.name for daemon in waiting)
                raise StartError(f"{names}: not needed any more")
            time.sleep(_POLL_S if waiting else 0)
    except BaseException:
        for daemon in started:
            end_group(daemon.process.pid, grace_s=5)
            daemon.process.poll()
        remove_abandoned()
        raise
    return clients


def stop_daemons(clients: Sequence[DaemonClient], grace_s: float) -> None:
    """Ask each daemon to end, wait, and end the process group of one that does not.

    One on another machine that does not end is left to its lease.
    """
    for client in clients:
        with suppress(DaemonError):
            client.stop()
    deadline = time.monotonic() + grace_s

    def see_to(client: DaemonClient) -> None:
        pid, here = client.registration.pid, client.registration.machine == this_machine()
        while (_running(pid) if here else client.alive()) and time.monotonic() < deadline:
            time.sleep(_END_POLL_S)
        if here and _running(pid):
            end_group(pid, grace_s=2)
        client.close()

    with ThreadPoolExecutor(max(1, len(clients))) as pool:
        list(pool.map(see_to, clients))
    remove_abandoned()  # what a daemon that was killed could not


def _adopt(store: Store, layout: RunLayout, name: str) -> DaemonClient | None:
    try:
        client = DaemonClient.find(store, layout, name)
    except DaemonGoneError:
        return None
    with suppress(DaemonError):  # it may end while it is looked at
        if client.alive() and not _failed(client):
            client.renew()
            return client
    # Its registration stays until a new one replaces it: a gateway takes its old port from it.
    client.close()
    return None


def _failed(client: DaemonClient) -> bool:
    """Whether it is the host of a cell that has failed for ever; it is ended then."""
    if client.registration.kind != "cell" or client.call("GET", "/status")["role"] != "failed":
        return False
    stop_daemons([client], FAILED_GRACE_S)
    return True


def _end_unregistered(store: Store, layout: RunLayout, spec: DaemonSpec) -> None:
    """End processes of this very daemon on this machine. It would register over its successor."""
    argv = _argv(store, layout, spec)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[1 : len(argv)] == argv[1:]:
                end_group(process.pid, FAILED_GRACE_S)


def _argv(store: Store, layout: RunLayout, spec: DaemonSpec) -> list[str]:
    """Its command line but for arguments that differ between attempts."""
    argv = [sys.executable, "-m", spec.module]
    return [*argv, "--root", store.url, "--run", layout.run_id, "--name", spec.name]


def _start(store: Store, layout: RunLayout, spec: DaemonSpec, number: int = 1) -> _Started:
    argv = [*_argv(store, layout, spec), *spec.arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log = store.local_file(layout.log(spec.name))
    logged = log_size(log)
    process = spawn(argv, env=env, log=log, detached=True)
    return _Started(spec, process, log, logged, time.monotonic() + spec.start_limit_s, number)


def _ready(store: Store, layout: RunLayout, daemon: _Started) -> DaemonClient | None:
    """Its client when it has registered; None as long as it may still do so.

    Raises:
        _EndedError: it has ended.
        StartError: its time is over.
    """
    spec, pid = daemon.spec, daemon.process.pid
    if store.exists(layout.host(spec.name)):
        client = DaemonClient.find(store, layout, spec.name)
        if client.registration.pid == pid and client.alive():
            return client
        client.close()
    code = daemon.process.poll()
    if code is None and time.monotonic() < daemon.deadline:
        return None
    text = log_since(daemon.log, daemon.logged)
    if code is None:
        raise StartError(
            f"{spec.name} is not ready after {spec.start_limit_s:g} s; it said last: "
            f"{last_line(text)}\nlog: {daemon.log}"
        )
    raise _EndedError(f"{spec.name} {exit_words(code)}: {reason(text)}\nlog: {daemon.log}")


def _arrived(store: Store, layout: RunLayout, daemon: _Awaited) -> DaemonClient | None:
    """Its client when it answers; None as long as it may still come.

    Raises:
        StartError: its time is over.
    """
    client = _adopt(store, layout, daemon.spec.name)
    if client is None and time.monotonic() > daemon.deadline:
        raise StartError(
            f"{daemon.spec.name} is started elsewhere and did not come within "
            f"{daemon.spec.start_limit_s:g} s (cells.start_limit_s): run "
            f"`{daemon.spec.elsewhere}` on its machine"
        )
    return client


def _running(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
