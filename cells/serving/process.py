"""A server as a child process: started, watched, ended with all its own children."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cells.process import end_group, spawn
from cells.serving.engine import EngineClient
from cells.serving.flags import EngineSettings, engine_argv, engine_environment

LOG_LINES = 15
END_GRACE_S = 3.0


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. SGLang can't be given a listening socket."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def log_tail(log: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log; reads at most its last 64 KiB."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (64 << 10)))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"({error})"
    return "\n".join(line[:500] for line in text.splitlines()[-lines:])


class EngineProcess:
    """One SGLang server. Start it in the main thread, whose end also ends the server.

    Args:
        cpus: cores that it is pinned to; none does not pin.
        log: file that its output is appended to.
    """

    def __init__(self, settings: EngineSettings, *, cpus: Sequence[int], log: Path) -> None:
        self.settings = settings
        self._log = log
        self._process: subprocess.Popen[bytes] = spawn(
            engine_argv(settings),
            env=engine_environment(settings, os.environ),
            log=log,
            cpus=cpus,
        )
        self._client = EngineClient(settings.url, settings.admin_key)
        self._closed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def token(self) -> str:
        """Of its control calls."""
        return self.settings.admin_key

    def failure(self) -> str:
        """How the server ended and what it said last; empty while it lives."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"SGLang ended with exit code {code}; {self._log} ends:\n{log_tail(self._log)}"

    async def wait_ready(self, limit_s: float) -> None:
        """See ``EngineClient.wait_ready``; a process that ended is told with the end of its log."""
        await self._client.wait_ready(limit_s, self.failure)

    async def version(self) -> int:
        """See ``EngineClient.version``."""
        return await self._client.version()

    async def drain(self, limit_s: float) -> None:
        """See ``EngineClient.drain``."""
        await self._client.drain(limit_s)

    async def update_weights(self, path: Path, version: int, limit_s: float) -> None:
        """See ``EngineClient.update_weights``."""
        await self._client.update_weights(path, version, limit_s)

    async def close(self) -> None:
        """End the server and its children. Safe to call again."""
        await self._client.close()
        if not self._closed:
            await asyncio.to_thread(end_group, self.pid, END_GRACE_S)
            self._process.poll()
            self._closed = True
