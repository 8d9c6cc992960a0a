"""One process's place in Mooncake: blocks that it serves, reads of others' blocks.

The engine lives in the process whose memory it serves: a block is registered by address, and an
address means something only there. So the replica owns it, not the daemon above it.

There are two engines. One serves, and is never replaced: its port is in the descriptors that
others hold. One reads; after a failure Mooncake may be unable to reach that peer ever again, and
late bytes may still arrive, so the reading engine and its staging memory are thrown away together
and made anew.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cells.transfer.block import HEADER_BYTES, Block, Descriptor, Header, checksum
from cells.transfer.errors import (
    CorruptBlockError,
    StaleBlockError,
    TransferError,
    TransferTimeoutError,
)
from cells.transfer.listening import heard_at

CHUNK_BYTES = 16 << 20
IN_FLIGHT = 8
"""Chunks that are under way at once."""
_POLL_S = 0.001
_COMPLETED = 1
_PENDING = 0


@dataclass
class Counters:
    """What went through an endpoint since its start."""

    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    failures: int = 0
    published_bytes: int = 0


@dataclass
class _Reader:
    engine: Any
    staging: Tensor


class Endpoint:
    """Serves blocks of this process and reads blocks of others. For one thread.

    Args:
        host: address that other cells reach this process at.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.incarnation = secrets.token_hex(8)
        self.counters = Counters()
        self._host = host
        self._serving = _make_engine(host)
        self._peer = f"{host}:{self._serving.get_rpc_port()}"
        self._blocks: list[Block] = []
        self._reader: _Reader | None = None

    def serve(self, block: Block) -> None:
        """Register a block's memory; it is kept as long as this endpoint.

        Raises:
            TransferError: Mooncake refused.
        """
        _register(self._serving, block.memory)
        self._blocks.append(block)

    def publish(self, block: Block, version: int) -> Descriptor:
        """Sign a served block and describe it to readers."""
        assert any(block is served for served in self._blocks)
        header = block.seal(self.incarnation, version)
        self.counters.published_bytes += block.nbytes
        return Descriptor(
            peer=self._peer,
            address=block.memory.data_ptr(),
            nbytes=header.nbytes,
            checksum=header.checksum,
            incarnation=header.incarnation,
            version=header.version,
        )

    def read(self, descriptor: Descriptor, *, limit_s: float) -> Tensor:
        """The verified payload of a block, uint8 [nbytes]; valid until the next read.

        Raises:
            TransferError: and its kinds, see ``cells.transfer.errors``. The reading engine is new
                afterwards, and the next read starts clean.
        """
        began = time.monotonic()
        total = HEADER_BYTES + descriptor.nbytes
        reader = self._reading(total)
        staging = reader.staging[:total]
        staging[:HEADER_BYTES].zero_()
        try:
            _transfer(reader.engine, descriptor, staging, began + limit_s)
            _verify(descriptor, staging)
        except TransferError:
            self.counters.failures += 1
            self._reader = None
            raise
        self.counters.reads += 1
        self.counters.read_bytes += total
        self.counters.read_seconds += time.monotonic() - began
        return staging[HEADER_BYTES:]

    def _reading(self, nbytes: int) -> _Reader:
        if self._reader is None or self._reader.staging.numel() < nbytes:
            staging = torch.empty(nbytes, dtype=torch.uint8)
            engine = _make_engine(self._host)
            # TCP would read into unregistered memory as well; RDMA refuses it.
            _register(engine, staging)
            self._reader = _Reader(engine, staging)
        return self._reader


def _make_engine(host: str) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the library is loaded
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    with heard_at(host):
        code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if code != 0:
        raise TransferError(f"Mooncake can't listen on {host}: no free port or a wrong address")
    return engine


def _register(engine: Any, memory: Tensor) -> None:
    if engine.register_memory(memory.data_ptr(), memory.numel()) != 0:
        raise TransferError(f"Mooncake refused to register {memory.numel()} bytes")


def _transfer(engine: Any, descriptor: Descriptor, into: Tensor, deadline: float) -> None:
    """Read header and payload in chunks.

    Every chunk is a batch of its own: the state of a batch can be asked without waiting only for
    its first entry.
    """
    what = f"block of {descriptor.nbytes} bytes at {descriptor.peer}"
    waiting = list(range(0, into.numel(), CHUNK_BYTES))[::-1]
    flying: list[int] = []
    while waiting or flying:
        while waiting and len(flying) < IN_FLIGHT:
            start = waiting.pop()
            length = min(CHUNK_BYTES, into.numel() - start)
            batch = engine.batch_transfer_async_read(
                descriptor.peer,
                [into.data_ptr() + start],
                [descriptor.address + start],
                [length],
            )
            # 0 and -1 (unsigned) are failures; asking for their state would crash the process.
            if batch in (0, -1, (1 << 64) - 1):
                raise TransferError(f"{what}: can't be reached")
            flying.append(batch)
        pending = []
        for batch in flying:
            state = engine.transfer_check_status(batch)
            if state == _PENDING:
                pending.append(batch)
            elif state != _COMPLETED:
                raise TransferError(f"{what}: the transfer failed (state {state})")
        flying = pending
        if flying:
            if time.monotonic() > deadline:
                raise TransferTimeoutError(f"{what}: not complete in time")
            time.sleep(_POLL_S)


def _verify(descriptor: Descriptor, staging: Tensor) -> None:
    expected = Header(
        descriptor.incarnation, descriptor.version, descriptor.nbytes, descriptor.checksum
    )
    where = f"{descriptor.peer}: version {descriptor.version}"
    if bytes(staging[:HEADER_BYTES].numpy()) != expected.pack():
        raise StaleBlockError(f"{where} is not there any more: rewritten, or the process restarted")
    found = checksum(staging[HEADER_BYTES:])
    if found != descriptor.checksum:
        raise CorruptBlockError(
            f"{where}: checksum {found:#010x}, expected {descriptor.checksum:#010x}"
        )
