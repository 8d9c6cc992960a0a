"""Answers of a running call: whole or streamed, ended early when the client goes away."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cells.gateway.calls import LiveCall
from cells.gateway.chat import KEEP_ALIVE, ChunkWriter, write_error, write_reply
from cells.gateway.forms import ChatRequest, RefusedError, Reply

KEEP_ALIVE_EVERY_S = 10.0
CallTask = asyncio.Task[Reply | None]


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

    def __init__(self, call: LiveCall, task: CallTask, request: ChatRequest) -> None:
        super().__init__()
        self._call = call
        self._task = task
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({self._task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not self._task.done():
                self._call.abandon()
            response = await self._response()
        finally:
            gone.cancel()
        await response(scope, receive, send)

    async def _response(self) -> Response:
        try:
            reply = await asyncio.shield(self._task)
        except RefusedError as error:
            return refusal(error)
        if reply is None:
            return Response(status_code=499)  # nobody is left to read it
        return Response(write_reply(reply, self._request.model), media_type="application/json")


class StreamedAnswer(Response):
    """Sends text as it comes, comments while there is none, and the end once the call is recorded.

    Args:
        texts: pieces (field, text) that the call emits.
    """

    def __init__(
        self,
        call: LiveCall,
        task: CallTask,
        request: ChatRequest,
        texts: asyncio.Queue[tuple[str, str] | None],
    ) -> None:
        super().__init__()
        self._call = call
        self._task = task
        self._texts = texts
        self._writer = ChunkWriter(call.message_id, request)
        task.add_done_callback(lambda _: texts.put_nowait(None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await self._body(gone, send)
        finally:
            gone.cancel()
            if not self._task.done():
                self._call.abandon()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _body(self, gone: asyncio.Task[None], send: Send) -> None:
        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        await write(self._writer.start())
        while True:
            coming = asyncio.ensure_future(self._texts.get())
            while not coming.done():
                await asyncio.wait(
                    {coming, gone},
                    timeout=KEEP_ALIVE_EVERY_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if gone.done():
                    coming.cancel()
                    return
                if not coming.done():
                    await write(KEEP_ALIVE)
            piece = coming.result()
            if piece is None:
                break
            await write(self._writer.text(*piece))
        await write(self._end())

    def _end(self) -> bytes:
        try:
            reply = self._task.result()
        except RefusedError as error:
            return self._writer.error(error)
        return self._writer.end(reply) if reply is not None else b""


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
