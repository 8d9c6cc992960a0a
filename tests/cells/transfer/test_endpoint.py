"""Reads through a real Mooncake between processes: whole and verified, or refused by kind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cells.transfer.block import HEADER_BYTES, Descriptor
from cells.transfer.endpoint import CHUNK_BYTES, Endpoint
from cells.transfer.errors import (
    CorruptBlockError,
    StaleBlockError,
    TransferError,
    TransferTimeoutError,
)

pytestmark = pytest.mark.real
LIMIT_S = 30.0
SMALL = 1_000
LARGE = 3 * CHUNK_BYTES // 4 + 17  # floats: several chunks, and a part of one


class Peer:
    """A publishing process."""

    def __init__(self, floats: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cells.transfer.peer", str(floats)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self.descriptor = self._answer()

    def tell(self, what: str) -> Descriptor:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> Descriptor:
        assert self.process.stdout is not None
        return Descriptor.model_validate_json(self.process.stdout.readline())


@pytest.fixture
def peer() -> Iterator[Callable[[int], Peer]]:
    peers: list[Peer] = []

    def start(floats: int) -> Peer:
        peers.append(Peer(floats))
        return peers[-1]

    yield start
    for one in peers:
        one.end()


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    return Endpoint()


def read(endpoint: Endpoint, descriptor: Descriptor) -> torch.Tensor:
    return endpoint.read(descriptor, limit_s=LIMIT_S).view(torch.float32)


def test_publications_are_read_whole_until_their_half_is_needed(
    peer: Callable[[int], Peer], endpoint: Endpoint
) -> None:
    source = peer(SMALL)
    first = source.descriptor
    before = endpoint.counters.read_bytes
    assert torch.equal(read(endpoint, first), torch.arange(SMALL, dtype=torch.float32))
    assert endpoint.counters.read_bytes - before == first.nbytes + HEADER_BYTES
    second = source.tell("publish")
    assert (second.version, second.incarnation) == (4, first.incarnation)
    assert read(endpoint, second)[0] == 1
    assert read(endpoint, first)[0] == 0, "the version before is not written over"
    source.tell("publish")
    with pytest.raises(StaleBlockError, match="version 3 is not there any more"):
        read(endpoint, first)
    assert read(endpoint, second)[0] == 1, "the engine is new, the peer is reached again"


def test_what_differs_from_the_descriptor_is_refused(
    peer: Callable[[int], Peer], endpoint: Endpoint
) -> None:
    source = peer(SMALL)
    good = source.descriptor
    for wrong in ({"incarnation": "0" * 16}, {"version": 9}, {"checksum": good.checksum ^ 1}):
        with pytest.raises(StaleBlockError):
            read(endpoint, good.model_copy(update=wrong))
    failures = endpoint.counters.failures
    source.tell("corrupt")
    with pytest.raises(CorruptBlockError, match="checksum"):
        read(endpoint, good)
    assert endpoint.counters.failures == failures + 1


def test_a_stopped_peer_costs_the_deadline_and_a_killed_one_less(
    peer: Callable[[int], Peer], endpoint: Endpoint
) -> None:
    source = peer(LARGE)
    expected = torch.arange(LARGE, dtype=torch.float32)
    assert torch.equal(read(endpoint, source.descriptor), expected)
    source.process.send_signal(signal.SIGSTOP)
    with pytest.raises(TransferTimeoutError, match="not complete in time"):
        endpoint.read(source.descriptor, limit_s=0.5)
    source.process.send_signal(signal.SIGCONT)
    assert torch.equal(read(endpoint, source.descriptor), expected), "late bytes do no harm"
    gone = source.descriptor
    source.end()
    with pytest.raises(TransferError):
        read(endpoint, gone)
    again = peer(SMALL)
    assert read(endpoint, again.descriptor)[5] == 5
