"""Memory that others read: a header and a payload, side by side.

A reader takes both in one go and believes the payload only when the header is the one that it was
told of and the checksum fits. So a block that is written again while somebody reads it, or that
belongs to another process on a reused address, is found out: Mooncake itself reports success then.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from configs.field import Section

HEADER_BYTES = 64
"""Keeps the payload aligned as torch aligns its own tensors."""
_MAGIC = b"GYREBLK1"
_LAYOUT = struct.Struct("<8s16sqQI")


class Descriptor(Section):
    """What a reader needs to know of a block, as it is sent out of band."""

    peer: str = Field(min_length=3, max_length=300)
    """host:port of the engine that serves it."""
    address: int = Field(gt=0)
    """Of the header, in the memory of the process that serves it."""
    nbytes: int = Field(ge=0)
    """Of the payload."""
    checksum: int = Field(ge=0, lt=1 << 32)
    incarnation: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Of the serving process: differs after a restart."""
    version: int = Field(ge=0)
    """Of the weights that the payload is or belongs to."""


@dataclass(frozen=True)
class Header:
    """The part of a descriptor that lies in the block itself."""

    incarnation: str
    version: int
    nbytes: int
    checksum: int

    def pack(self) -> bytes:
        fields = (self.incarnation.encode(), self.version, self.nbytes, self.checksum)
        return _LAYOUT.pack(_MAGIC, *fields).ljust(HEADER_BYTES, b"\0")


class Block:
    """A header and ``payload`` uint8 [nbytes] in one piece of memory of this process."""

    def __init__(self, nbytes: int) -> None:
        self.memory: Tensor = torch.zeros(HEADER_BYTES + nbytes, dtype=torch.uint8)
        self.payload: Tensor = self.memory[HEADER_BYTES:]
        self.header: Header | None = None

    @property
    def nbytes(self) -> int:
        return int(self.payload.numel())

    def floats(self) -> Tensor:
        """The payload as float32 [nbytes / 4]."""
        return self.payload.view(torch.float32)

    def seal(self, incarnation: str, version: int) -> Header:
        """Sign what the payload holds now; it must not change until ``open``."""
        header = Header(incarnation, version, self.nbytes, checksum(self.payload))
        self._write(header.pack())
        self.header = header
        return header

    def open(self) -> None:
        """Take the signature off before the payload changes: readers refuse it from now on."""
        self.header = None
        self._write(bytes(HEADER_BYTES))

    def _write(self, header: bytes) -> None:
        self.memory[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)


def checksum(payload: Tensor) -> int:
    """CRC-32 of a uint8 tensor in main memory."""
    found: int = zlib.crc32(memoryview(payload.numpy()))
    return found
