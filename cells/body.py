"""Bodies of requests to daemons, no larger than they have to be."""

from __future__ import annotations

from starlette.requests import Request


class BodyTooLargeError(ValueError):
    """The body of a request exceeds its limit; the rest was not read."""


async def read_body(request: Request, most: int) -> bytes:
    """A body of at most ``most`` bytes, whatever its header says of it.

    Raises:
        BodyTooLargeError: it is larger.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise BodyTooLargeError(f"the body exceeds {most} bytes")
    return bytes(body)
