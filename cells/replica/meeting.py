"""How the ranks of a replica come together: on one machine over a Unix socket, and over several at
an address of the leader's machine.

A rank connects and says which one it is; the leader answers with the settings and where torch's
store is. The connection then carries the leader's commands. Whoever finds it closed ends: a replica
lives and dies as one.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from cells.replica.errors import ReplicaError
from cells.replica.frames import FrameError, pack_frame, receive_frame
from cells.replica.settings import ReplicaSettings
from configs.field import Section

TOKEN_VARIABLE = "GYRE_RANKS_TOKEN"
"""Environment variable that holds the secret which ranks of other machines show."""
_HELLO_LIMIT_S = 5.0
_HELLO_LIMIT_BYTES = 4096
_RETRY_S = 0.2
_STRANGERS = 64
"""Connections that may wait beside those of the ranks."""
_SILENT_S, _PROBES, _PROBE_S = 10, 4, 5
"""A machine that vanished is noticed after half a minute."""


class Hello(Section):
    """The first words of a rank."""

    rank: int
    token: str


class Welcome(Section):
    """The leader's answer to them."""

    settings: ReplicaSettings
    store: str
    """Of torch: the path of a file, or HOST:PORT."""


class Meeting:
    """The leader's side.

    Args:
        folder: for the socket, where all ranks are on one machine.
    """

    def __init__(self, settings: ReplicaSettings, folder: Path) -> None:
        self._settings = settings
        self._token = os.environ.get(TOKEN_VARIABLE, "")
        if settings.nodes == 1:
            self.address = str(folder / "socket")
            self._listening = socket.socket(socket.AF_UNIX)
            self._listening.bind(self.address)
        else:
            if not self._token:
                raise ReplicaError(f"ranks on several machines need a secret in {TOKEN_VARIABLE}")
            self.address = settings.meeting
            self._listening = socket.create_server(host_and_port(self.address))
        self._listening.listen(settings.layout.ranks + _STRANGERS)

    def admit(self, store: str) -> list[socket.socket]:
        """Wait for all other ranks and welcome them; their connections, in order.

        Raises:
            TimeoutError: one did not come within the limit of the settings.
        """
        welcome = Welcome(settings=self._settings, store=store).model_dump(mode="json")
        deadline = time.monotonic() + self._settings.ranks_limit_s
        wanted = set(range(1, self._settings.layout.ranks))
        came: dict[int, socket.socket] = {}
        while missing := wanted - came.keys():
            self._listening.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                stream, _ = self._listening.accept()
            except TimeoutError:
                raise TimeoutError(f"ranks {sorted(missing)} did not come in time") from None
            rank = self._heard(stream)
            if rank not in missing:
                stream.close()
                continue
            stream.sendall(pack_frame(welcome))
            stream.settimeout(None)
            came[rank] = stream
        self._listening.close()
        return [came[rank] for rank in sorted(came)]

    def _heard(self, stream: socket.socket) -> int | None:
        """Which rank has connected; None for a stranger."""
        stream.settimeout(_HELLO_LIMIT_S)
        _keep_alive(stream)
        with suppress(OSError, FrameError, ValueError):
            frame = receive_frame(stream, _HELLO_LIMIT_BYTES)
            hello = Hello.model_validate(frame)
            if hmac.compare_digest(hello.token.encode(), self._token.encode()):
                return hello.rank
        return None


def join(address: str, rank: int, limit_s: float) -> socket.socket:
    """Connect to the leader, which may not listen yet, as ``rank``.

    Args:
        address: of its meeting: a path, or HOST:PORT.

    Raises:
        TimeoutError: nobody listens there within ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            stream = _connected(address)
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no leader at {address}: {error}") from None
            time.sleep(_RETRY_S)
    _keep_alive(stream)
    hello = Hello(rank=rank, token=os.environ.get(TOKEN_VARIABLE, ""))
    stream.sendall(pack_frame(hello.model_dump()))
    return stream


def welcomed(stream: socket.socket, limit_s: float) -> Welcome:
    """The leader's answer.

    Raises:
        ReplicaError: it closed the connection: another secret, or this rank is there already.
        TimeoutError: none within ``limit_s``.
    """
    stream.settimeout(limit_s)
    frame = receive_frame(stream)
    stream.settimeout(None)
    if frame is None:
        raise ReplicaError(
            f"the leader refused this rank: is {TOKEN_VARIABLE} its secret, and the rank's number "
            f"one that is missing?"
        )
    return Welcome.model_validate(frame)


def end_with(streams: Sequence[socket.socket], what: str) -> None:
    """From now on end this process, whatever it does, when the other side of one closes."""
    poll = select.poll()
    for stream in streams:
        poll.register(stream, select.POLLRDHUP)

    def watch() -> None:
        poll.poll()
        print(f"{what} is gone: its connection closed", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def use_interface_of(address: str) -> None:
    """Have gloo and NCCL use the network interface that has ``address``.

    Raises:
        ReplicaError: none of this machine's has it.
    """
    number = socket.gethostbyname(address)
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(one.address == number for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
    raise ReplicaError(
        f"{address} is the address of no interface of this machine ({', '.join(interfaces)})"
    )


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _connected(address: str) -> socket.socket:
    if "/" not in address:
        return socket.create_connection(host_and_port(address), timeout=_HELLO_LIMIT_S)
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(address)
    return stream


def _keep_alive(stream: socket.socket) -> None:
    if stream.family is socket.AF_UNIX:
        return
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
