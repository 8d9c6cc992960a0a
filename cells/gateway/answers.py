"""Answers of a running call: whole or streamed, given up when the client goes away."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cells.gateway.chat import KEEP_ALIVE, ChunkWriter, write_error, write_reply
from cells.gateway.forms import ChatRequest, RefusedError
from cells.gateway.resends import Delivery

KEEP_ALIVE_EVERY_S = 10.0


def refusal(error: RefusedError) -> Response:
    """The answer to a refused request."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return Response(
        write_error(error), error.status, headers=headers, media_type="application/json"
    )


class WholeAnswer(Response):
    """Waits for the reply and sends it in one piece."""

    def __init__(self, delivery: Delivery, request: ChatRequest) -> None:
        super().__init__()
        self._delivery = delivery
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = self._delivery
        gone = asyncio.create_task(_disconnected(receive))
        try:
            waits: set[asyncio.Future[Any]] = {delivery.reply, gone}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() or not delivery.reply.done():
                return
            await self._response()(scope, receive, send)
            delivery.delivered()
        finally:
            gone.cancel()
            delivery.abandon()

    def _response(self) -> Response:
        try:
            reply = self._delivery.reply.result()
        except RefusedError as error:
            return refusal(error)
        if reply is None:
            return Response(status_code=499)  # nobody is left to read it
        return Response(write_reply(reply, self._request.model), media_type="application/json")


class StreamedAnswer(Response):
    """Sends text as it comes, comments while there is none, and the end once the call is
    recorded."""

    def __init__(self, delivery: Delivery, request: ChatRequest) -> None:
        super().__init__()
        self._delivery = delivery
        self._writer = ChunkWriter(f"chatcmpl-{delivery.call_id}", request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if not await self._body(gone, send) or gone.done():
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            self._delivery.delivered()
        finally:
            gone.cancel()
            self._delivery.abandon()

    async def _body(self, gone: asyncio.Task[None], send: Send) -> bool:
        """Send all of it; False when the client went away before."""
        texts, reply = self._delivery.texts, self._delivery.reply
        assert texts is not None

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        reply.add_done_callback(lambda _: texts.put_nowait(None))
        gone.add_done_callback(lambda _: texts.put_nowait(None))
        await write(self._writer.start())
        while not gone.done():
            try:
                async with asyncio.timeout(KEEP_ALIVE_EVERY_S):
                    piece = await texts.get()
            except TimeoutError:
                await write(KEEP_ALIVE)
                continue
            if piece is not None:
                await write(self._writer.text(*piece))
            elif reply.done():
                await write(self._end())
                return True
        return False

    def _end(self) -> bytes:
        try:
            reply = self._delivery.reply.result()
        except RefusedError as error:
            return self._writer.error(error)
        return self._writer.end(reply) if reply is not None else b""


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
