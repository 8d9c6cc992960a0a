"""Ports for servers that can't be given a listening socket."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from configs.tls import is_loopback

PORTS = range(17_001, 32_000)
"""Below what the kernel gives to outgoing connections, above 15000 to 17000, where Mooncake's
engines take whatever is free."""
OPEN = range(15_000, 32_000)
"""All that the machines of a run listen at: what a firewall has to let through between them."""
_TRIES = 200


def listen(host: str) -> socket.socket:
    """A socket that listens at ``host``: at any free port of this machine where only its own
    processes can connect, else at one of ``PORTS``.

    Raises:
        OSError: none was free in many tries.
    """
    if is_loopback(host):
        return socket.create_server((host, 0))
    refused: OSError | None = None
    for port in random.SystemRandom().sample(PORTS, _TRIES):
        try:
            return socket.create_server((host, port))
        except OSError as error:
            refused = error
    raise OSError(f"no free port on {host} between {PORTS.start} and {PORTS.stop}: {refused}")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now, and that nobody takes by chance before its server binds it.

    SGLang binds its port only after its imports: one from the kernel's range could be taken
    meanwhile by any client on the machine.

    Raises:
        OSError: none was free in many tries.
    """
    for port in random.SystemRandom().sample(PORTS, _TRIES):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError(f"no free port on {host} between {PORTS.start} and {PORTS.stop}")
