"""The Prefect server, work pool and worker of this machine: found, or started and ended again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from cells.process import end_group, spawn
from configs.cells import PrefectConfig

PARALLEL_RUNS = 1
"""Two runs on one machine would share the cores of its cells."""
AWAY_S = 600.0
"""How long a server may be away before a run that is under way fails for it."""
_WATCH_S = 1.0
_START_AGAIN_LIMIT_S = 30.0
RESTARTS = 5
"""Of a server or a worker that was started here and ends, after pauses that double from a second
on."""
CELLS_QUEUE = "cells"
"""Queue of the work pool for flows that take cells; the queue ``default`` is for the others."""

IN_BATCHES = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
}
"""A server records task runs and events one by one unless it is told otherwise, which on SQLite
costs several times the processor time and falls behind in a burst."""

DATABASE_URL = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
"""Environment variable of Prefect's: the database of a server that is started here. None is a file
of SQLite."""
REDIS_URL = "PREFECT_REDIS_MESSAGING_URL"
"""Environment variable of prefect-redis: a server that is started here sends its events through
that Redis, keeps their order and its leases there, and its background work."""
THROUGH_REDIS = {
    "PREFECT_SERVER_EVENTS_MESSAGING_BROKER": "prefect_redis.messaging",
    "PREFECT_SERVER_EVENTS_MESSAGING_CACHE": "prefect_redis.messaging",
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "prefect_redis.ordering",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect_redis.lease_storage",
}


class ServerError(RuntimeError):
    """The orchestration server can't be used; the text says why and what to do."""


@dataclass(frozen=True)
class Orchestration:
    """Where the server is, and whether what was started here still runs."""

    api_url: str
    ui_url: str
    check: Callable[[], None]
    """Raises ``ServerError`` when a process that was started here ends again and again."""
    started: tuple[subprocess.Popen[bytes], ...] = ()
    """The processes that were started here."""
    own_server: bool = False
    """Whether the server is one of them."""


@contextmanager
def orchestration(
    config: PrefectConfig, home: Path, say: Callable[[str], None]
) -> Iterator[Orchestration]:
    """A healthy server with the work pool and a worker, for as long as the block lasts.

    The worker is always a new one. A server that ``PREFECT_API_URL`` names, or that answers on
    ``config.port``, is used and left running. What had to be started is ended at the end of the
    block.

    Raises:
        ServerError: the port belongs to another program, or the server does not start.
    """
    started: list[subprocess.Popen[bytes]] = []
    named = os.environ.get("PREFECT_API_URL")
    api_url = named or f"http://127.0.0.1:{config.port}/api"
    environment = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_CLI_COLORS": "false",
        # Its client doubles the pause before each try: a server that is away for minutes, as for
        # an upgrade, ends nothing that runs.
        "PREFECT_CLIENT_MAX_RETRIES": "8",
        # Results are names of objects: nothing here is ever pickled.
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        **IN_BATCHES,
    }
    try:
        # Before anything imports prefect, which reads its settings once.
        os.environ.update(environment)
        server = None if healthy(api_url) else _start_server(config, home, named, say)
        if server is not None:
            started.append(server)
            _wait_healthy(server, api_url, config.start_limit_s, home)
            if DATABASE_URL not in os.environ:  # another server may use the same one
                _close_orphans()
        say(f"Prefect UI: {api_url.removesuffix('/api')}")
        ensure_pool(config.work_pool)
        parts = []
        if server is not None:
            again = partial(_start_server, config, home, named, say)
            parts.append(_Part("the Prefect server", 0, again))
        parts.append(_Part("the worker", len(started), partial(_start_worker, config, home)))
        started.append(parts[-1].again())
        watch = _Watch(started, parts, home, say)
        watch.start()
        try:
            yield Orchestration(
                api_url=api_url,
                ui_url=api_url.removesuffix("/api"),
                check=watch.check,
                started=tuple(started),
                own_server=server is not None,
            )
        finally:
            watch.close()
    finally:
        for process in reversed(started):
            end_group(process.pid, grace_s=10)
            process.wait()


@dataclass
class _Part:
    """A process that was started here, and how it is started again."""

    name: str
    place: int
    """Among all that were started."""
    again: Callable[[], subprocess.Popen[bytes]]
    restarts: int = 0
    due: float | None = None
    """When it is started again, on the monotonic clock; None while it runs."""


class _Watch:
    """Of the processes that were started here; one that ends is started again. The database of a
    server is on the disk, and what runs goes on without it for minutes. What a worker ran ends
    with it, and is run again by the next one (`flows.revival`)."""

    def __init__(
        self,
        started: list[subprocess.Popen[bytes]],
        parts: list[_Part],
        home: Path,
        say: Callable[[str], None],
    ) -> None:
        self._started = started
        self._parts = parts
        self._home = home
        self._say = say
        self._failure: ServerError | None = None
        self._closed = threading.Event()
        # In a thread, as whoever asks the server that has ended waits for it, for minutes. What it
        # starts ends with this thread, which is when all that was started here is ended.
        self._thread = threading.Thread(target=self._watch, name="server-watch", daemon=True)

    def start(self) -> None:
        """Look after them from now on."""
        self._thread.start()

    def close(self) -> None:
        """Start nothing any more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_START_AGAIN_LIMIT_S)

    def check(self) -> None:
        """
        Raises:
            ServerError: one of them has ended too often, or can't be started again.
        """
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            try:
                self.look()
            except (ServerError, OSError) as error:
                self._failure = ServerError(str(error))
                return

    def look(self) -> None:
        """Start again what has ended.

        Raises:
            ServerError: one of them has ended too often.
        """
        for part in self._parts:
            process = self._started[part.place]
            if process.poll() is None:
                continue
            if part.restarts >= RESTARTS:
                raise ServerError(
                    f"{part.name} has ended with code {process.returncode} for the "
                    f"{RESTARTS + 1}th time; its log is in {self._home}"
                )
            if part.due is None:
                part.due = time.monotonic() + 2**part.restarts
            if time.monotonic() >= part.due:
                part.restarts += 1
                self._say(
                    f"{part.name} has ended with code {process.returncode}: started again, "
                    f"{part.restarts} of {RESTARTS} times"
                )
                self._started[part.place] = part.again()
                part.due = None


def healthy(api_url: str) -> bool:
    """Whether a Prefect server answers there."""
    try:
        answer = httpx.get(f"{api_url}/health", timeout=5, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


def await_server(say: Callable[[str], None], limit_s: float = AWAY_S) -> None:
    """Until the server of this process answers, or for so long: a client that was never connected
    does not try again by itself."""
    api_url = os.environ.get("PREFECT_API_URL")
    deadline = time.monotonic() + limit_s
    pause_s = 1.0
    while api_url is not None and not _answers(api_url) and time.monotonic() < deadline:
        say(f"no Prefect server answers at {api_url}: waiting for it")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 30.0)


def _answers(api_url: str) -> bool:
    """Whether anything answers there, as Prefect's own client would reach it."""
    try:
        httpx.get(f"{api_url}/health", timeout=10)
    except httpx.TransportError:
        return False
    return True


def _start_server(
    config: PrefectConfig, home: Path, named: str | None, say: Callable[[str], None]
) -> subprocess.Popen[bytes]:
    if named is not None:
        raise ServerError(
            f"PREFECT_API_URL is {named}, and no Prefect server answers there: start it, or unset "
            f"the variable and let gyre start one"
        )
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", config.port)) == 0:
            raise ServerError(
                f"port {config.port} is taken by a program that is not a Prefect server: end it, "
                f"or choose another port with --set prefect.port=4201"
            )
    where = "PostgreSQL" if os.environ.get(DATABASE_URL, "").startswith("postgresql") else "SQLite"
    redis = _through_redis()
    say(
        f"starting the Prefect server on port {config.port}, on {where}{' and Redis' * bool(redis)}"
    )
    argv = [sys.executable, "-m", "prefect", "server", "start"]
    argv += ["--host", "127.0.0.1", "--port", str(config.port)]
    return spawn(argv, env={**redis, **os.environ}, log=home / "server.log")


def _through_redis() -> dict[str, str]:
    """What a server must be told where REDIS_URL names a Redis; nothing where none is named."""
    url = os.environ.get(REDIS_URL)
    if not url:
        return {}
    if find_spec("prefect_redis") is None:
        raise ServerError(
            f"{REDIS_URL} is set, and the package prefect-redis is not installed: "
            f"pip install 'gyre-rl[scaled]', or unset the variable"
        )
    return {**THROUGH_REDIS, "PREFECT_SERVER_DOCKET_URL": url}


def _wait_healthy(
    server: subprocess.Popen[bytes], api_url: str, limit_s: float, home: Path
) -> None:
    deadline = time.monotonic() + limit_s
    while not healthy(api_url):
        if server.poll() is not None or time.monotonic() > deadline:
            log = (home / "server.log").read_text(errors="replace").splitlines()
            raise ServerError(
                f"the Prefect server did not start within {limit_s:g} s; its log ends:\n"
                + "\n".join(log[-12:])
            )
        time.sleep(0.25)


def _close_orphans() -> None:
    """Mark runs crashed that an earlier server left unfinished: with that server everything that
    ran them has ended, and each would keep its place in the work pool for ever."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import State, StateType
    from prefect.states import Crashed

    lost = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
    which = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=lost)))
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=which):
            ended: State[Any] = Crashed(message="the Prefect server that ran it has ended")
            client.set_flow_run_state(run.id, ended, force=True)


def ensure_pool(work_pool: str) -> None:
    """The work pool, made as one of processes where it is not there, with the queues that flows
    use: those that take cells wait for each other, and those that only start others do not."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            pool = client.read_work_pool(work_pool)
            if pool.type == "process" and pool.concurrency_limit == PARALLEL_RUNS:
                # Of an earlier Gyre: a sweep would hold the only place and wait for its runs.
                client.update_work_pool(work_pool, WorkPoolUpdate(concurrency_limit=None))
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=work_pool, type="process"))
        try:
            client.read_work_queue_by_name(CELLS_QUEUE, work_pool)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):
                client.create_work_queue(
                    CELLS_QUEUE,
                    description="Flows that take the cells of this machine, one after the other.",
                    concurrency_limit=PARALLEL_RUNS,
                    work_pool_name=work_pool,
                )


def _start_worker(config: PrefectConfig, home: Path) -> subprocess.Popen[bytes]:
    """A worker of our own, also where others are: one that was killed a minute ago still counts
    as online, and a run that waited for it would wait for ever."""
    argv = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
    argv += ["--pool", config.work_pool, "--name", f"{socket.gethostname()}-{os.getpid()}"]
    # The flow run is a child of the worker; it needs this environment's programs first.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    return spawn(argv, env=env, log=home / "worker.log")
