"""Replica processes of a test: real ones, that may be killed at any moment and come back."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from cells.replica.client import ReplicaCallError, ReplicaClient
from cells.replica.frames import read_frame
from cells.replica.settings import ReplicaSettings
from configs.training import ObjectiveConfig
from tasks.training.objectives import objective_path
from tasks.training.replica import ReplicaLostError

_START_LIMIT_S = 120

# Importing Megatron takes most of a replica's start. One process does it once; each replica is a
# fork of that one, and from there on the same program in a process and a session of its own.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["cells.replica.commands", "cells.replica.model"])


def demanding() -> ObjectiveConfig:
    """The loss that needs most: log-probs under the step's first weights and the run's."""
    return ObjectiveConfig(clip_low=0.5, clip_high=1.0, ratio="proximal", importance_cap=2, kl=0.1)


class Replica:
    """A replica process, commanded from any thread; ``start`` makes a new one after its death."""

    def __init__(self, loop, root, log, name, *, core, loss=None):
        self.name, self.core = name, core
        self._loop, self._log = loop, log
        self._settings = ReplicaSettings(
            root=str(root),
            core=core,
            objective=objective_path("gspo"),
            objective_config=loss or demanding(),
        )
        self.start()

    def start(self):
        self.client = self._wait(_fork(self._settings, self._log), _START_LIMIT_S)

    @property
    def alive(self):
        return self.client.alive

    def kill(self):
        with suppress(ProcessLookupError):
            os.kill(self.client.pid, signal.SIGKILL)

    def call(self, command, args, limit_s):
        try:
            return self._wait(self.client.call(command, args, limit_s), limit_s + 5)
        except ReplicaCallError as error:
            raise ReplicaLostError(f"{self.name}: {command}: {error}") from error

    def close(self):
        self._wait(self.client.close(), 20)

    def _wait(self, work, limit_s):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)


class EventLoop:
    """An event loop in a thread, that outlives the replicas that are started on it."""

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self._loop

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Forked:
    """A process of multiprocessing with what the client asks of one of subprocess."""

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("replica", timeout)
        return self._process.exitcode


async def _fork(settings, log):
    connected = asyncio.Queue()
    with tempfile.TemporaryDirectory(prefix="gyre-replica-") as folder:
        path = Path(folder) / "socket"
        server = await asyncio.start_unix_server(lambda *pair: connected.put_nowait(pair), path)
        given = (str(path), settings.model_dump_json(), str(log))
        process = _FORKS.Process(target=_replica, args=given, daemon=True)
        process.start()
        async with asyncio.timeout(_START_LIMIT_S):
            reader, writer = await connected.get()
            assert "ready" in await read_frame(reader)
        server.close()
    return ReplicaClient(_Forked(process), reader, writer, log)


def _replica(socket_path, settings, log):
    from cells.replica.worker import main

    os.setsid()
    with open(log, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = ["replica", "--socket", socket_path, "--settings", settings]
    sys.exit(main())
