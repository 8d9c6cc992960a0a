"""A server as a child process: started, watched, ended with all its own children and files."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from cells.process import end_group, spawn
from cells.reason import exit_words, last_line, log_since, log_size, reason
from cells.serving.engine import Bucket, EngineClient, EngineLateError
from cells.serving.flags import EngineSettings, engine_argv, engine_environment
from cells.tls import Tls

END_GRACE_S = 3.0
_LOADS = "/dev/shm/sglang_loads_"


class EngineProcess:
    """One SGLang server. Start it in the main thread, whose end also ends the server.

    Args:
        cpus: cores that it is pinned to; none does not pin.
        log: file that its output is appended to.
        tls: certificates of the run, for a host that is not the loopback address.

    Raises:
        TlsError: a certificate of the settings can't be used.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        cpus: Sequence[int],
        log: Path,
        tls: Tls | None = None,
    ) -> None:
        self.settings = settings
        self._log = log
        self._logged = log_size(log)
        self._files = ExitStack()
        identity = self._files.enter_context(tls.identity(settings.host)) if tls else None
        self.url = settings.url(secure=identity is not None)
        # SGLang leaves the sockets between its processes where temporary files go.
        self._temporary = Path(tempfile.mkdtemp(prefix="gyre-engine-"))
        environment = engine_environment(settings, os.environ) | {"TMPDIR": str(self._temporary)}
        self._process: subprocess.Popen[bytes] = spawn(
            engine_argv(settings, identity), env=environment, log=log, cpus=cpus
        )
        pooled = settings.kv_pool is not None
        ca = identity.ca if identity else ""
        self._client = EngineClient(self.url, settings.admin_key, pooled=pooled, ca=ca)
        self._closed = False
        self.token_capacity = settings.kv_tokens
        """Tokens of its KV cache; what the server says, once it is ready."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def token(self) -> str:
        """Of its control calls."""
        return self.settings.admin_key

    def failure(self) -> str:
        """How the server ended and why, from its log; empty while it lives."""
        code = self._process.poll()
        if code is None:
            return ""
        why = reason(log_since(self._log, self._logged))
        return f"SGLang {exit_words(code)}: {why}\nlog: {self._log}"

    async def wait_ready(self, limit_s: float) -> None:
        """See ``EngineClient.wait_ready``; a process that ended is told with the cause in its log,
        one that is late with its last line."""
        try:
            await self._client.wait_ready(limit_s, self.failure)
            self.token_capacity = await self._client.token_capacity(limit_s)
        except EngineLateError as error:
            said = last_line(log_since(self._log, self._logged))
            raise EngineLateError(
                f"SGLang: {error}; it said last: {said}\nlog: {self._log}\n"
                f"raise cells.start_limit_s where it is only slow"
            ) from None

    async def version(self) -> int:
        """See ``EngineClient.version``."""
        return await self._client.version()

    async def answers(self, limit_s: float) -> None:
        """See ``EngineClient.token_capacity``, which SGLang's scheduler is asked for."""
        await self._client.token_capacity(limit_s)

    async def drain(self, limit_s: float) -> None:
        """See ``EngineClient.drain``."""
        await self._client.drain(limit_s)

    async def update_weights(self, path: Path, version: int, limit_s: float) -> None:
        """See ``EngineClient.update_weights``."""
        await self._client.update_weights(path, version, limit_s)

    async def load_tensors(
        self, buckets: AsyncIterator[Bucket], version: int, limit_s: float
    ) -> None:
        """See ``EngineClient.load_tensors``."""
        await self._client.load_tensors(buckets, self.settings.ranks, version, limit_s)

    async def settle(self, limit_s: float) -> bool:
        """See ``EngineClient.settle``; at once without a shared pool."""
        return self.settings.kv_pool is None or await self._client.settle(limit_s)

    async def release_memory(self, limit_s: float) -> None:
        """See ``EngineClient.release_memory``."""
        await self._client.release_memory(limit_s)

    async def resume_memory(self, limit_s: float) -> None:
        """See ``EngineClient.resume_memory``."""
        await self._client.resume_memory(limit_s)

    async def close(self) -> None:
        """End the server and its children, remove its files. Safe to call again."""
        await self._client.close()
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        shared = _shared_files(self.pid)
        end_group(self.pid, END_GRACE_S)
        self._process.poll()
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._files.close()
        for path in shared:
            path.unlink(missing_ok=True)


def _shared_files(pid: int) -> set[Path]:
    """SGLang's load counters in shared memory, under a random name that it never removes."""
    found = set()
    with suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(OSError):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                found |= {Path(line[line.index(_LOADS) :]) for line in lines if _LOADS in line}
    return found
