"""Mooncake's engines listen at every address of the machine, whatever address they are given, and
serve whoever asks for memory of their process. Where a run is on the loopback address, their
sockets are made deaf to all other network interfaces.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from configs.tls import is_loopback

log = logging.getLogger(__name__)

LOOPBACK_DEVICE = "lo"
PORTS = range(15_000, 17_001)
"""Where Mooncake's engines listen; MC_MIN_RPC_PORT and MC_MAX_RPC_PORT in the environment narrow
it."""


@contextmanager
def heard_at(host: str) -> Iterator[None]:
    """Sockets on which this process begins to listen in the block hear the loopback device only, if
    ``host`` is its address. For one thread at a time.

    Elsewhere they stay as they are: a machine reaches its own address by another device than others
    do. There a firewall has to keep others away.
    """
    before = set(_listening())
    yield
    if not is_loopback(host):
        return
    for number in set(_listening()) - before:
        with socket.socket(fileno=os.dup(number)) as listener:
            try:
                name = f"{LOOPBACK_DEVICE}\0".encode()
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
            except OSError as error:  # a kernel before 5.7 wants privileges for it
                port = listener.getsockname()[1]
                log.warning("port %d is open to the network: %s", port, error)


def _listening() -> list[int]:
    """File descriptors of this process's listening sockets."""
    connections = psutil.Process().net_connections(kind="tcp")
    return [one.fd for one in connections if one.status == psutil.CONN_LISTEN]
