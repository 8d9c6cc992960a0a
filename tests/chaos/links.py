"""A link between two parts that is slow, or lets nothing through any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_PIECE = 1 << 14
_LIMIT_S = 20.0


class Link:
    """Passes TCP connections on to ``host:port``, each piece ``delay_s`` late, and at most
    ``bytes_per_s`` in each direction. May be changed while it is in use.

    The kernels that tests run on seldom have ``netem``; this needs nothing of them.
    """

    def __init__(self, host: str, port: int) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = float("inf")
        self.stalled = False
        self.connections = 0
        self.port = 0
        self._to = (host, port)

    async def serve(self) -> None:
        """Until cancelled."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            await server.serve_forever()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection(*self._to)
        try:
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, and so is the other; or all is over
        finally:
            for end in (writer, back):
                end.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            await asyncio.sleep(self.delay_s + len(data) / self.bytes_per_s)
            while self.stalled:  # noqa: ASYNC110 - set from another thread
                await asyncio.sleep(0.02)
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


@contextmanager
def link_to(url: str) -> Iterator[tuple[Link, str]]:
    """A link to the server of ``url``, in a thread of its own, and the address to use instead."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    link = Link(parts.hostname, parts.port)
    loop = asyncio.new_event_loop()
    serving = loop.create_task(link.serve())

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, name="link", daemon=True)
    thread.start()
    try:
        waited = threading.Event()
        for _ in range(int(_LIMIT_S / 0.01)):
            if link.port:
                break
            waited.wait(0.01)
        assert link.port, "the link does not listen"
        yield link, f"{parts.scheme}://127.0.0.1:{link.port}"
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(_LIMIT_S)
