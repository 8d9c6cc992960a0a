"""Memory for KV pages: a Mooncake master and the segment that it hands out.

A lossy cache: pages are evicted when the segment is full, and all are gone with this process. The
memory is not in an engine, because an engine that is killed would take its share of every
session's pages with it. Seen with Mooncake 0.3.13 over TCP, without a GPU.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cells.ports import free_port
from cells.process import end_group, spawn
from cells.reason import exit_words, last_line, log_since, log_size
from cells.transfer.listening import heard_at

MASTER = "mooncake_master"
METADATA = "P2PHANDSHAKE"
"""Peers exchange what they need with each other: no metadata server."""
_LOCAL_BUFFER_BYTES = 16 << 20
_END_GRACE_S = 3.0
_POLL_S = 0.05
_LEASE_MS = 5_000
"""How long a page that was read can't be evicted; time enough to copy it."""


class KvPoolError(RuntimeError):
    """The pool did not start; the text says why and where its log is."""


class KvPool:
    """A master and its only segment, from construction to ``close``.

    Args:
        host: address that engines reach it at.
        size: bytes for pages.
        log: file that the master's output is appended to.
        limit_s: longest start.

    Raises:
        KvPoolError: Mooncake is not installed, or did not start in time.
    """

    def __init__(self, *, host: str, size: int, log: Path, limit_s: float) -> None:
        # Not at the top: it loads RDMA libraries, which only this process needs.
        from mooncake.store import MooncakeDistributedStore

        self.address = f"{host}:{free_port(host)}"
        self._log, self._logged = log, log_size(log)
        self._master: subprocess.Popen[bytes] = spawn(
            _master_argv(self.address), env=dict(os.environ), log=log
        )
        self._segment: Any = MooncakeDistributedStore()
        try:
            self._wait_listening(host, limit_s)
            with heard_at(host):
                code = self._segment.setup(
                    host, METADATA, size, _LOCAL_BUFFER_BYTES, "tcp", "", self.address
                )
            if code != 0:
                raise KvPoolError(f"Mooncake took no segment of {size} bytes: code {code}\n{log}")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the master."""
        return self._master.pid

    def failure(self) -> str:
        """How the master ended; empty while it lives."""
        code = self._master.poll()
        if code is None:
            return ""
        said = last_line(log_since(self._log, self._logged))
        return f"{MASTER} {exit_words(code)}: {said}\nlog: {self._log}"

    def close(self) -> None:
        """Give the memory back and end the master. Blocks for seconds."""
        with suppress(Exception):  # nothing can be done about a segment that does not close
            self._segment.close()
        end_group(self._master.pid, _END_GRACE_S)
        self._master.wait()

    def _wait_listening(self, host: str, limit_s: float) -> None:
        port = int(self.address.rpartition(":")[2])
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if why := self.failure():
                raise KvPoolError(why)
            with suppress(OSError), socket.create_connection((host, port), timeout=1):
                return
            time.sleep(_POLL_S)
        raise KvPoolError(f"{MASTER} does not listen after {limit_s:g} s\nlog: {self._log}")


def _master_argv(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    # Installed beside the interpreter; its folder need not be on PATH.
    program = shutil.which(MASTER, path=str(Path(sys.executable).parent)) or MASTER
    flags = {
        "rpc_address": host,
        "rpc_port": port,
        "metrics_host": host,
        "metrics_port": str(free_port(host)),
        "default_kv_lease_ttl": str(_LEASE_MS),
        "rpc_thread_num": "2",
        "enable_metric_reporting": "false",
        "logtostderr": "true",
    }
    return [program, *(f"--{name}={value}" for name, value in flags.items())]
