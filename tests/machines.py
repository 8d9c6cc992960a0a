"""Machines of a test: this one and network namespaces on a bridge, with an address each."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

IP_LIMIT_S = 60
_numbers = itertools.count()


class Machine(NamedTuple):
    """
    Args:
        address: at which the others reach it.
        enter: what comes before a command that is to run there.
    """

    address: str
    enter: tuple[str, ...]


@contextmanager
def machines(*further: str) -> Iterator[dict[str, Machine]]:
    """This machine, as ``here``, and further ones by their names, until the end of the block."""
    number, pid = next(_numbers), os.getpid()
    bridge = f"gy{pid % 10_000}x{number}"
    subnet = f"10.{64 + (pid // 250 + number) % 128}.{pid % 250}"
    found = {"here": Machine(f"{subnet}.1", ())}
    made: list[str] = []
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("address", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for at, name in enumerate(further, 2):
            inside, outside = f"{bridge}-{name}", f"{bridge}{name}"[:15]
            ip("netns", "add", inside)
            made.append(inside)
            ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", inside)
            ip("link", "set", outside, "master", bridge, "up")
            ip("-n", inside, "address", "add", f"{subnet}.{at}/24", "dev", "eth0")
            ip("-n", inside, "link", "set", "eth0", "up")
            ip("-n", inside, "link", "set", "lo", "up")
            found[name] = Machine(f"{subnet}.{at}", ("ip", "netns", "exec", inside))
        yield found
    finally:
        for inside in made:
            ip("netns", "delete", inside)
        ip("link", "delete", bridge)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=IP_LIMIT_S)
