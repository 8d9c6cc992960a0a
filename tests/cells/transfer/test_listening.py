"""Who can connect to the sockets that Mooncake opens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from cells.transfer.listening import PORTS, heard_at

DEVICE = f"gyrel{os.getpid() % 10_000}"
ADDRESS = f"10.78.{os.getpid() % 250}"
LIMIT_S = 30


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=LIMIT_S)


@pytest.fixture
def other_machine() -> Iterator[str]:
    """A namespace with a link to this machine, whose end here has ``ADDRESS``.1."""
    ip("netns", "add", DEVICE)
    try:
        ip("link", "add", DEVICE, "type", "veth", "peer", "name", "eth0", "netns", DEVICE)
        ip("address", "add", f"{ADDRESS}.1/24", "dev", DEVICE)
        ip("link", "set", DEVICE, "up")
        ip("-n", DEVICE, "address", "add", f"{ADDRESS}.2/24", "dev", "eth0")
        ip("-n", DEVICE, "link", "set", "eth0", "up")
        yield DEVICE
    finally:
        ip("netns", "delete", DEVICE)


CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20).close()
except ConnectionRefusedError:
    print("refused")
else:
    print("connected")
"""


def connecting(namespace: str, host: str, port: int) -> str:
    """What becomes of a connection from there."""
    argv = ["ip", "netns", "exec", namespace, sys.executable, "-c", CONNECT, host, str(port)]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S).stdout.strip()


def test_what_listens_at_every_address_is_heard_on_this_machine_only(other_machine: str) -> None:
    outside = f"{ADDRESS}.1"
    with closing(socket.create_server(("0.0.0.0", 0))) as before:
        with heard_at("127.0.0.1"):
            opened = [
                socket.create_server(("0.0.0.0", 0)),
                socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True),
            ]
        for listener in opened:
            with closing(listener):
                port = listener.getsockname()[1]
                assert connecting(other_machine, outside, port) == "refused"
                socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S).close()
        assert connecting(other_machine, outside, before.getsockname()[1]) == "connected"


def test_an_address_of_the_network_is_left_to_the_firewall(other_machine: str) -> None:
    with heard_at(f"{ADDRESS}.1"):
        listener = socket.create_server(("0.0.0.0", 0))
    with closing(listener):
        port = listener.getsockname()[1]
        assert connecting(other_machine, f"{ADDRESS}.1", port) == "connected"


OPEN = """
import psutil, sys
from cells.transfer.endpoint import Endpoint
endpoint = Endpoint("127.0.0.1")
for one in psutil.Process().net_connections(kind="tcp"):
    if one.status == psutil.CONN_LISTEN:
        print(one.laddr.port)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.real
def test_mooncake_does_not_hear_the_network(other_machine: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    late = threading.Timer(120, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        ports = [int(line) for line in iter(process.stdout.readline, "ready\n") if line.strip()]
        assert ports and all(port in PORTS for port in ports)
        for port in ports:
            assert connecting(other_machine, f"{ADDRESS}.1", port) == "refused"
            socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S).close()
    finally:
        late.cancel()
        process.kill()
        process.wait()
