"""Starting the daemons of a run on this machine, adopting those that live, keeping their leases."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cells.client import DaemonClient, DaemonError, DaemonGoneError
from cells.process import end_group, spawn
from storage.layout import RunLayout
from storage.objects import StorageError, Store

RENEWALS_PER_LEASE = 6
FAILED_GRACE_S = 15.0


@dataclass(frozen=True)
class DaemonSpec:
    """How a daemon is started when none is there."""

    name: str
    module: str
    arguments: tuple[str, ...]
    start_limit_s: float


class StartError(RuntimeError):
    """A daemon did not start; the text holds the end of its log."""


class LeaseKeeper:
    """A thread that renews the leases of daemons until it is closed."""

    def __init__(self, lease_s: float) -> None:
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
                    client.renew()


def ensure_daemons(
    store: Store,
    layout: RunLayout,
    specs: Sequence[DaemonSpec],
    keeper: LeaseKeeper,
    say: Callable[[str], None],
) -> dict[str, DaemonClient]:
    """A client of each daemon, adopted where it lives, started where it does not, in parallel.

    Args:
        keeper: renews each lease from the moment that its daemon is found, as others may take
            longer to start than a lease lasts.

    Raises:
        StartError: one ended or did not register in time. What was started here is ended.
    """
    clients: dict[str, DaemonClient] = {}
    started: dict[str, int] = {}
    try:
        for spec in specs:
            adopted = _adopt(store, layout, spec.name)
            if adopted is not None:
                say(f"{spec.name}: adopted, pid {adopted.registration.pid}")
                clients[spec.name] = adopted
                keeper.add(adopted)
            else:
                started[spec.name] = _start(store, layout, spec)
        for spec in specs:  # the light ones come first, so that their leases are renewed early
            if spec.name in started:
                clients[spec.name] = _wait(store, layout, spec, started[spec.name])
                keeper.add(clients[spec.name])
                say(f"{spec.name}: ready at {clients[spec.name].url}")
    except BaseException:
        for pid in started.values():
            end_group(pid, grace_s=5)
        raise
    return clients


def stop_daemons(clients: Sequence[DaemonClient], grace_s: float) -> None:
    """Ask each daemon to end, wait, and end the process group of one that does not."""
    for client in clients:
        with suppress(DaemonError):
            client.stop()
    deadline = time.monotonic() + grace_s
    for client in clients:
        pid = client.registration.pid
        while psutil.pid_exists(pid) and _running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        if _running(pid):
            end_group(pid, grace_s=2)
        client.close()


def _adopt(store: Store, layout: RunLayout, name: str) -> DaemonClient | None:
    try:
        client = DaemonClient.find(store, layout, name)
    except DaemonGoneError:
        return None
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


def _start(store: Store, layout: RunLayout, spec: DaemonSpec) -> int:
    argv = [sys.executable, "-m", spec.module]
    argv += ["--root", store.url, "--run", layout.run_id, "--name", spec.name, *spec.arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log = _log(store, layout, spec.name)
    return spawn(argv, env=env, log=log, detached=True).pid


def _wait(store: Store, layout: RunLayout, spec: DaemonSpec, pid: int) -> DaemonClient:
    deadline = time.monotonic() + spec.start_limit_s
    while time.monotonic() < deadline:
        if store.exists(layout.host(spec.name)):
            client = DaemonClient.find(store, layout, spec.name)
            if client.registration.pid == pid and client.alive():
                return client
            client.close()
        if not _running(pid):
            break
        time.sleep(0.1)
    state = "ended" if not _running(pid) else f"is not ready after {spec.start_limit_s:g} s"
    raise StartError(f"{spec.name} {state}; its log ends:\n{_tail(store, layout, spec.name)}")


def _running(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _log(store: Store, layout: RunLayout, name: str) -> Path:
    try:
        return store.local_path(layout.log(name))
    except StorageError:
        # An object store has no files to append to: logs stay on this machine.
        return Path.home() / ".cache" / "gyre" / layout.run_id / f"{name}.log"


def _tail(store: Store, layout: RunLayout, name: str) -> str:
    try:
        lines = _log(store, layout, name).read_text(errors="replace").splitlines()
    except OSError as error:
        return f"({error})"
    return "\n".join(lines[-15:])
