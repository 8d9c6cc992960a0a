"""Through the gate a sandbox hands the host what only exists inside."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.rollout.sandboxes.entry import GO, READY


@dataclass(frozen=True)
class HandedOut:
    """What came through a gate. ``close`` must be called in every case."""

    listener: socket.socket | None
    """Listens on the loopback device of the sandbox's own network, where it has one."""
    folder: int
    """Descriptor of the workspace; it stays readable when the sandbox has ended. What lies in a
    workspace of the sandbox's own is gone when this is closed."""

    @property
    def workspace(self) -> Path:
        return Path(f"/proc/self/fd/{self.folder}")

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        os.close(self.folder)


class Gate:
    """The host's side. ``close`` must be called in every case.

    Args:
        path: the sandbox connects to a socket there; without it the sandbox inherits ``inside``.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.inside: int | None = None
        self._server: socket.socket | None = None
        if path is None:
            self._host, inside = socket.socketpair()
            self.inside = inside.detach()
        else:
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(str(path))
            self._server.listen(1)
            self._server.setblocking(False)

    def close_inside(self) -> None:
        """Once the sandbox has its end, this process must not keep it open."""
        if self.inside is not None:
            os.close(self.inside)
            self.inside = None

    async def passed(self, limit_s: float) -> HandedOut | None:
        """What the sandbox hands out; None when it ended before, or did not within ``limit_s``."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(limit_s):
                if self._server is not None:
                    self._host, _ = await asyncio.get_running_loop().sock_accept(self._server)
                await _readable(self._host)
                text, descriptors, _, _ = socket.recv_fds(self._host, 1, 2)
                if text == READY and len(descriptors) == 2:
                    listener = socket.socket(fileno=descriptors[0])
                    listener.setblocking(False)
                    return HandedOut(listener, descriptors[1])
                for descriptor in descriptors:
                    os.close(descriptor)
        return None

    def go(self) -> None:
        """Let the command begin."""
        with suppress(OSError):  # it has ended
            self._host.sendall(GO)

    def close(self) -> None:
        self.close_inside()
        if self._server is not None:
            self._server.close()
        if hasattr(self, "_host"):
            self._host.close()


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(connection.fileno(), event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(connection.fileno())
