"""A replica process and the commands to it, from the event loop of its owner."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from cells.process import end_group, spawn
from cells.replica.frames import FrameError, pack_frame, read_frame
from cells.replica.meeting import TOKEN_VARIABLE
from cells.replica.settings import ReplicaSettings

_END_GRACE_S = 3.0
_LOG_SHOWN_BYTES = 2000


class ReplicaCallError(RuntimeError):
    """A command was not carried out, or nobody knows whether it was."""


class ReplicaRefusedError(ReplicaCallError):
    """The replica lives and refused; ``kind`` is the name of the worker's exception."""

    def __init__(self, command: str, kind: str, text: str) -> None:
        super().__init__(f"{command}: {kind}: {text}")
        self.kind = kind


class ReplicaDeadError(ReplicaCallError):
    """The process ended; what it held is gone."""


class ReplicaDeadlineError(ReplicaCallError):
    """No answer in time. The command may still be carried out; later ones come after it."""


class ReplicaClient:
    """Owner of one replica process. Make it with ``start``; for one event loop.

    Commands may be sent at the same time: the replica takes them in the order of the calls.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: Path,
    ) -> None:
        self.process = process
        self._writer = writer
        self._log = log
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(
        cls,
        settings: ReplicaSettings,
        *,
        log: Path,
        limit_s: float,
        cpus: Sequence[int] = (),
        ranks_token: str = "",
    ) -> Self:
        """Start a worker and wait until it is ready. Call it on the main thread's event loop.

        Args:
            ranks_token: secret that ranks of other machines join with, where there are some.

        Raises:
            ReplicaDeadError: it ended first; the text holds the end of its log.
            ReplicaDeadlineError: it is not ready within ``limit_s``; it was ended.
        """
        connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        connected = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.put_nowait((reader, writer))

        with tempfile.TemporaryDirectory(prefix="gyre-replica-") as folder:
            path = Path(folder) / "socket"
            server = await asyncio.start_unix_server(accept, path)
            process = spawn(
                [
                    *(sys.executable, "-m", "cells.replica.worker", "--socket", str(path)),
                    *("--settings", settings.model_dump_json()),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", TOKEN_VARIABLE: ranks_token},
                log=log,
                cpus=cpus,
            )
            try:
                async with asyncio.timeout(limit_s):
                    reader, writer = await _unless_ended(connected.get(), process, log)
                    ready = await read_frame(reader)
            except BaseException as error:
                await asyncio.to_thread(_end, process)
                if isinstance(error, TimeoutError):
                    raise ReplicaDeadlineError(
                        f"replica not ready within {limit_s:g} s{_log_end(log)}"
                    ) from None
                raise
            finally:
                server.close()
        if ready is None or "ready" not in ready:
            await asyncio.to_thread(_end, process)
            raise ReplicaDeadError(f"replica ended while it started{_log_end(log)}")
        return cls(process, reader, writer, log)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and not self._listening.done()

    async def call(
        self, command: str, args: dict[str, Any] | None = None, limit_s: float = 60
    ) -> dict[str, Any]:
        """Carry out a command and return its answer.

        Raises:
            ReplicaRefusedError: the replica refused, and is as it was before.
            ReplicaDeadError: it is dead, or died meanwhile.
            ReplicaDeadlineError: no answer within ``limit_s``.
        """
        if not self.alive:
            raise ReplicaDeadError(f"{command}: the replica is dead{_log_end(self._log)}")
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._writer.write(pack_frame({"id": number, "command": command, "args": args or {}}))
            async with asyncio.timeout(limit_s):
                await self._writer.drain()
                frame = await answer
        except TimeoutError:
            raise ReplicaDeadlineError(f"{command}: no answer within {limit_s:g} s") from None
        except ConnectionError as error:
            raise ReplicaDeadError(f"{command}: {error}") from error
        finally:
            self._waiting.pop(number, None)
        if "error" in frame:
            raise ReplicaRefusedError(command, frame["error"]["kind"], frame["error"]["text"])
        result: dict[str, Any] = frame["answer"]
        return result

    async def close(self) -> None:
        """End the process and its group."""
        self._writer.close()
        await asyncio.to_thread(_end, self.process)
        with suppress(asyncio.CancelledError):
            await self._listening

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await read_frame(reader)) is not None:
                waiting = self._waiting.get(frame["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)
            reason = "the replica died"
        except FrameError as error:
            reason = f"the replica sent nonsense: {error}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ReplicaDeadError(f"{reason}{_log_end(self._log)}"))


async def _unless_ended(
    wanted: Any, process: subprocess.Popen[bytes], log: Path
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Await ``wanted``, or find out that the process has ended."""
    task = asyncio.ensure_future(wanted)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=0.1)
            if not task.done() and process.poll() is not None:
                raise ReplicaDeadError(
                    f"replica ended with code {process.returncode} while it started{_log_end(log)}"
                )
        result: tuple[asyncio.StreamReader, asyncio.StreamWriter] = task.result()
        return result
    finally:
        task.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    end_group(process.pid, grace_s=_END_GRACE_S)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_GRACE_S)


def _log_end(log: Path) -> str:
    """The last lines of a log, for an error's text."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_SHOWN_BYTES))
        text = file.read().decode(errors="replace").strip()
        return f"; end of {log}:\n{text}" if text else ""
    return ""
