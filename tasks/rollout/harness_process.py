"""One harness process with everything that it starts, owned from the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.rollout.sandboxes.cgroup import ControlGroup, make_group
from tasks.rollout.sandboxes.gate import Gate, HandedOut
from tasks.rollout.sandboxes.limits import Breach
from tasks.rollout.sandboxes.sandbox import Launch, Room, Sandbox
from tasks.rollout.strays import end_strays, find_strays

_SETTLE_S = 10.0
"""Longest time that killed processes may take to be gone."""
_START_LIMIT_S = 60.0
"""Longest time that a sandbox may take to come up."""


Ready = Callable[[Path, socket.socket | None], Awaitable[None]]
"""Called with the workspace, and with the listener in the command's own network where it has one,
before the command begins."""


class HarnessProcess:
    """A command in a sandbox. Made by ``start``; ``end`` must be called in every case, and then
    ``release`` when its workspace is not needed any more.

    It is started from the calling thread, which has to live as long as the owner: the kernel kills
    the process with that thread.

    Attributes:
        breaches: limits of its sandbox that it ran into, known after ``end``.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sandbox: Sandbox,
        room: Room,
        group: ControlGroup | None,
        handed: HandedOut | None,
    ) -> None:
        self._process = process
        self._sandbox = sandbox
        self._room = room
        self._group = group
        self._watch = os.pidfd_open(process.pid)
        self._first: int | None = None
        """Pid of the first process of the sandbox's namespace, where there is one."""
        self._first_watch: int | None = None
        self._handed = handed
        self.breaches: tuple[Breach, ...] = ()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        sandbox: Sandbox,
        room: Room,
        ready: Ready,
    ) -> HarnessProcess:
        """Run ``command`` in its workspace, output appended to ``log``.

        Raises:
            OSError: the sandbox's program can't be started.
        """
        group = await asyncio.to_thread(make_group, room.limits) if room.limits else None
        gate, handed = None, None
        info, info_end = os.pipe()
        try:
            gate = sandbox.make_gate(room)
            if gate is None:
                await ready(room.workspace, None)
                # Whatever is put in its place later, this stays the workspace.
                handed = HandedOut(None, os.open(room.workspace, os.O_RDONLY | os.O_DIRECTORY))
            launch = sandbox.launch(
                room, command, environment, group, gate, info_end if sandbox.wrappers else None
            )
            where = room.workspace if gate is None else room.folder
            self = cls(_spawn(launch, log, where), sandbox, room, group, handed)
        except BaseException:
            if handed is not None:
                handed.close()
            if group is not None:
                await asyncio.shield(asyncio.to_thread(group.end))
            if gate is not None:
                gate.close()
            os.close(info)
            raise
        finally:
            os.close(info_end)
        try:
            if sandbox.wrappers:
                self._first = await _first_process(info)
                self._first_watch = _pidfd(self._first)
            if gate is not None:
                await self._pass(gate, ready)
        except BaseException:  # nobody else would own it
            await asyncio.shield(self._abandon())
            raise
        finally:
            os.close(info)
            if gate is not None:
                gate.close()
        return self

    async def _pass(self, gate: Gate, ready: Ready) -> None:
        gate.close_inside()
        passing = asyncio.create_task(gate.passed(_START_LIMIT_S))
        ended = asyncio.create_task(_readable(self._watch, _START_LIMIT_S))
        try:
            await asyncio.wait((passing, ended), return_when=asyncio.FIRST_COMPLETED)
            self._handed = await passing if passing.done() else None
        finally:
            for task in (passing, ended):
                task.cancel()
            # Until they have let go of their descriptors, which are waited for again.
            await asyncio.wait((passing, ended))
        if self._handed is not None:
            await ready(self._handed.workspace, self._handed.listener)
            gate.go()

    async def _abandon(self) -> None:
        try:
            await self.end(0)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the workspace; one of the sandbox's own is gone with this."""
        handed, self._handed = self._handed, None
        if handed is not None:
            handed.close()

    @property
    def workspace(self) -> Path | None:
        """Readable until ``release``; None when the sandbox did not come up."""
        return None if self._handed is None else self._handed.workspace

    async def exit_code(
        self, limit_s: float, sooner: asyncio.Task[bool] | None = None
    ) -> int | None:
        """The exit code once the command has ended; None when it runs after ``limit_s``, or when
        ``sooner`` is done."""
        if await _readable(self._watch, limit_s, sooner):
            return self._process.wait()
        return None

    async def end(self, grace_s: float) -> None:
        """End the command and everything that it has started: SIGTERM to what runs, SIGKILL after
        ``grace_s`` to what is left. Nothing inside runs any more when this returns.

        Raises:
            OSError: something could not be killed.
        """
        try:
            if self._process.poll() is None and self.workspace is not None:
                for pid in await asyncio.to_thread(self._inside):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                await _readable(self._watch, grace_s)
            await self._kill()
        finally:
            if self._group is not None:
                await asyncio.to_thread(self._end_group, self._group)
            os.close(self._watch)
            if self._first_watch is not None:
                os.close(self._first_watch)

    async def _kill(self) -> None:
        ending = self._sandbox.ending(self._room)
        if ending is not None:
            await asyncio.to_thread(
                subprocess.run, ending, capture_output=True, timeout=_SETTLE_S, check=False
            )
        gone = True
        if self._sandbox.ends_all and self._first_watch is not None:
            # With the first process of its namespace the kernel ends all others in it.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_watch, signal.SIGKILL)
            gone = await _readable(self._first_watch, _SETTLE_S)
        elif not self._sandbox.ends_all:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(end_strays, str(self._room.folder))
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)
        if not await _readable(self._watch, _SETTLE_S) or not gone:
            raise OSError(f"process {self._process.pid} of {self._room.folder} can't be ended")
        self._process.wait()

    def _end_group(self, group: ControlGroup) -> None:
        self.breaches = group.breaches()
        group.end()

    def _inside(self) -> list[int]:
        """What runs inside now, the sandbox's own processes left out."""
        if not self._sandbox.wrappers:
            return [self._process.pid, *find_strays(str(self._room.folder))]
        return [] if self._first is None else _descendants(self._first)


def _spawn(launch: Launch, log: Path, where: Path) -> subprocess.Popen[bytes]:
    """Takes about a millisecond; a thread would not do, because the process ends with the
    thread."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            launch.argv,
            env=launch.environment,
            cwd=where,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=launch.descriptors,
        )


def _descendants(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


async def _first_process(pipe: int) -> int | None:
    """The pid that the sandbox names; None when it ended before it could."""
    text = b""
    while await _readable(pipe, _START_LIMIT_S):
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


async def _readable(
    descriptor: int, limit_s: float, sooner: asyncio.Task[bool] | None = None
) -> bool:
    """Whether ``descriptor`` (of a process: its end) is readable within ``limit_s``, or before
    ``sooner`` is done."""
    now = select.poll()
    now.register(descriptor, select.POLLIN)
    if now.poll(0):
        return True
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    waiting = loop.create_task(event.wait())
    try:
        tasks = {waiting} if sooner is None else {waiting, sooner}
        await asyncio.wait(tasks, timeout=max(limit_s, 0.001), return_when=asyncio.FIRST_COMPLETED)
        return event.is_set()
    finally:
        waiting.cancel()
        loop.remove_reader(descriptor)
