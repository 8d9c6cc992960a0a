"""One harness process with everything that it starts, owned from the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.rollout.sandboxes.sandbox import Room, Sandbox
from tasks.rollout.strays import end_strays, find_strays

_SETTLE_S = 10.0
"""Longest time that killed processes may take to be gone."""


class HarnessProcess:
    """A command in a sandbox. Made by ``start``; ``end`` must be called in every case.

    It is started from the calling thread, which has to live as long as the owner: the kernel kills
    the process with that thread.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], sandbox: Sandbox, room: Room, first: int | None
    ) -> None:
        self._process = process
        self._sandbox = sandbox
        self._room = room
        self._first = first
        """Pid of the first process of the sandbox's namespace, where there is one."""
        self._watch = os.pidfd_open(process.pid)
        self._first_watch = _pidfd(first)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        sandbox: Sandbox,
        room: Room,
    ) -> HarnessProcess:
        """Run ``command`` in the room's workspace, output appended to ``log``.

        Raises:
            OSError: the sandbox's program can't be started.
        """
        process, info = _spawn(command, environment, log, sandbox, room)
        try:
            first = await _first_process(info) if sandbox.wrappers else None
        except BaseException:  # cancelled: nobody would own it
            process.kill()
            process.wait()
            raise
        finally:
            os.close(info)
        return cls(process, sandbox, room, first)

    async def exit_code(self, limit_s: float) -> int | None:
        """The exit code once the command has ended; None when it runs after ``limit_s``."""
        if await _readable(self._watch, limit_s):
            return self._process.wait()
        return None

    async def end(self, grace_s: float) -> None:
        """End the command and everything that it has started: SIGTERM to what runs, SIGKILL after
        ``grace_s`` to what is left. Nothing inside runs any more when this returns.

        Raises:
            OSError: something could not be killed.
        """
        try:
            if not await _readable(self._watch, 0):
                for pid in await asyncio.to_thread(self._inside):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                await _readable(self._watch, grace_s)
            await self._kill()
        finally:
            os.close(self._watch)
            if self._first_watch is not None:
                os.close(self._first_watch)

    async def _kill(self) -> None:
        if self._sandbox.ends_all and self._first_watch is not None:
            # With the first process of its namespace the kernel ends all others in it.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_watch, signal.SIGKILL)
            gone = await _readable(self._first_watch, _SETTLE_S)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(end_strays, str(self._room.folder))
            gone = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)
        if not await _readable(self._watch, _SETTLE_S) or not gone:
            raise OSError(f"process {self._process.pid} of {self._room.folder} can't be ended")
        self._process.wait()

    def _inside(self) -> list[int]:
        """What runs inside now, the sandbox's own processes left out."""
        if not self._sandbox.wrappers:
            return [self._process.pid, *find_strays(str(self._room.folder))]
        return [] if self._first is None else _descendants(self._first)


def _spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    sandbox: Sandbox,
    room: Room,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the command: its process, and the pipe on which the sandbox writes about itself. Takes
    about a millisecond; a thread would not do, because the process ends with the thread."""
    info, info_end = os.pipe()
    try:
        wrapped = [*sandbox.prefix(room, info_end if sandbox.wrappers else None), *command]
        with open(log, "ab") as output:
            process = subprocess.Popen(
                wrapped,
                env={**sandbox.environment(room), **environment},
                cwd=room.workspace,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(info_end,) if sandbox.wrappers else (),
            )
    except BaseException:
        os.close(info)
        raise
    finally:
        os.close(info_end)
    return process, info


def _descendants(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


async def _first_process(pipe: int) -> int | None:
    """The pid that the sandbox names; None when it ended before it could."""
    text = b""
    while await _readable(pipe, _SETTLE_S):
        piece = os.read(pipe, 4096)
        if not piece:
            break
        text += piece
        with suppress(ValueError):
            return int(json.loads(text)["child-pid"])
    return None


def _pidfd(pid: int | None) -> int | None:
    if pid is None:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


async def _readable(descriptor: int, limit_s: float) -> bool:
    """Whether ``descriptor`` (of a process: its end) is readable within ``limit_s``."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await asyncio.wait_for(event.wait(), max(limit_s, 0.001))
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True
