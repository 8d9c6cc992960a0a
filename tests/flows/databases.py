"""PostgreSQL and Redis of this machine, each in a folder of its own that goes with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from cells.ports import free_port

_LIMIT_S = 120.0
_POLL_S = 0.2
_NAME = "prefect"


@dataclass(frozen=True)
class Service:
    """A database that runs."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Of all its processes, those that have ended included."""
        own = psutil.Process(self.pid)
        total = 0.0
        for process in (own, *own.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
        ended = own.cpu_times()
        return total + ended.children_user + ended.children_system


@contextmanager
def postgres() -> Iterator[Service]:
    """A new PostgreSQL database for Prefect. Root starts it as the user of Debian's package: a
    server refuses to run as root."""
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda at: float(at.parent.name))
    user = "postgres" if os.geteuid() == 0 else None
    port = free_port()
    with _folder("postgres", user) as folder:
        data, log = folder / "data", folder / "log"

        def run(program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
            argv = [str(programs / program), *arguments]
            return subprocess.run(
                argv, user=user, cwd=folder, capture_output=True, timeout=_LIMIT_S
            )

        made = run("initdb", "-D", str(data), "-U", _NAME, "-A", "trust", "--no-sync")
        assert made.returncode == 0, made.stderr.decode()
        argv = [str(programs / "postgres"), "-D", str(data), "-k", str(folder), "-p", str(port)]
        argv += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        to = ("-h", str(folder), "-p", str(port), "-U", _NAME)
        with open(log, "wb") as output:
            server = subprocess.Popen(
                argv, user=user, cwd=folder, stdout=output, stderr=output, start_new_session=True
            )
        with _running(server, signal.SIGINT):
            _until(lambda: run("pg_isready", *to).returncode == 0, server, log)
            made = run("createdb", *to, _NAME)
            assert made.returncode == 0, made.stderr.decode()
            yield Service(f"postgresql+asyncpg://{_NAME}@127.0.0.1:{port}/{_NAME}", server.pid)


@contextmanager
def redis() -> Iterator[Service]:
    """A new Redis that keeps nothing on the disk."""
    port = free_port()
    with _folder("redis", None) as folder:
        log = folder / "log"
        argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        argv += ["--save", "", "--appendonly", "no"]
        with open(log, "wb") as output:
            server = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)
        with _running(server, signal.SIGTERM):
            ping = ["redis-cli", "-p", str(port), "ping"]

            def answers() -> bool:
                found = subprocess.run(ping, capture_output=True, timeout=_LIMIT_S)
                return found.stdout.strip() == b"PONG"

            _until(answers, server, log)
            yield Service(f"redis://127.0.0.1:{port}/0", server.pid)


@contextmanager
def _folder(name: str, user: str | None) -> Iterator[Path]:
    """Not below a test's own folder, which other users may not enter."""
    folder = Path(tempfile.mkdtemp(prefix=f"gyre-{name}-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(server: subprocess.Popen[bytes], end: signal.Signals) -> Iterator[None]:
    try:
        yield
    finally:
        server.send_signal(end)
        try:
            server.wait(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _until(ready: Callable[[], bool], server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not ready():
        late = server.poll() is not None or time.monotonic() > deadline
        assert not late, log.read_text(errors="replace")
        time.sleep(_POLL_S)
