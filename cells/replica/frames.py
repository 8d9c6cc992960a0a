"""Length-prefixed JSON over a stream, and the frames that client and worker exchange."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import orjson

FRAME_LIMIT_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


class FrameError(RuntimeError):
    """The stream does not hold what was expected; the connection can't be used any more."""


def pack_frame(body: dict[str, Any]) -> bytes:
    """A frame: four bytes of length, big-endian, and JSON. Not-a-number becomes null."""
    data = orjson.dumps(body)
    if len(data) > FRAME_LIMIT_BYTES:
        raise FrameError(f"a frame of {len(data)} bytes, the limit is {FRAME_LIMIT_BYTES}")
    return _LENGTH.pack(len(data)) + data


def receive_frame(
    stream: socket.socket, limit_bytes: int = FRAME_LIMIT_BYTES
) -> dict[str, Any] | None:
    """The next frame of a blocking socket; None when the other side has closed it."""
    head = _exactly(stream, _LENGTH.size)
    if head is None:
        return None
    data = _exactly(stream, _length(head, limit_bytes))
    if data is None:
        raise FrameError("the stream ended within a frame")
    return _body(data)


async def read_frame(stream: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next frame of an asyncio stream; None when the other side has closed it."""
    try:
        head = await stream.readexactly(_LENGTH.size)
        return _body(await stream.readexactly(_length(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _length(head: bytes, limit_bytes: int = FRAME_LIMIT_BYTES) -> int:
    length = int(_LENGTH.unpack(head)[0])
    if length > limit_bytes:
        raise FrameError(f"a frame of {length} bytes, the limit is {limit_bytes}")
    return length


def _body(data: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FrameError(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise FrameError(f"a frame holds an object, got {type(body).__name__}")
    return body


def _exactly(stream: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = stream.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
