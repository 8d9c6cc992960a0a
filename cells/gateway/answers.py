"""Answers of a call: whole or streamed, kept alive while it waits, given up when the client goes
away."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cells.gateway.dialects.dialect import Dialect, EventWriter
from cells.gateway.forms import ChatRequest, RefusedError
from cells.gateway.resends import Delivery

log = logging.getLogger(__name__)

HOLD_STREAM_S = 1.0
"""How long a stream waits for its first text before its headers go: until then a call that fails is
answered with a status, and from then on the client hears something."""
HOLD_WHOLE_S = 10.0
"""The same for an answer in one piece."""
KEEP_ALIVE_EVERY_S = 10.0


def refusal(dialect: Dialect, error: RefusedError) -> Response:
    """The answer to a refused request."""
    headers = {}
    if error.retry_after_s is not None:
        headers = {"retry-after": str(error.retry_after_s), "x-should-retry": "true"}
    return Response(
        dialect.error(error), dialect.status(error), headers, media_type="application/json"
    )


class Answer(Response, ABC):
    """What is common to both."""

    media_type = ""

    def __init__(self, dialect: Dialect, delivery: Delivery, request: ChatRequest) -> None:
        super().__init__()
        self._dialect = dialect
        self._delivery = delivery
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        try:
            refused = await self._answer(gone, send)
            if refused is not None:
                await refused(scope, receive, send)
                self._delivery.delivered()
        finally:
            gone.cancel()
            self._delivery.abandon()

    @abstractmethod
    async def _answer(self, gone: asyncio.Task[None], send: Send) -> Response | None:
        """Send the answer; a refusal that can still have its status is returned instead."""

    def _refused(self) -> Response | None:
        """The answer of a call that has ended without a reply, if it did."""
        try:
            reply = self._delivery.reply.result()
        except RefusedError as error:
            return refusal(self._dialect, error)
        return None if reply is not None else Response(status_code=499)  # nobody is left to read it

    async def _head(self, send: Send) -> None:
        headers = [
            (b"content-type", self.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-request-id", self._delivery.call_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class WholeAnswer(Answer):
    """Waits for the reply and sends it in one piece.

    After a while the headers go, and white space, which JSON may begin with, keeps the connection.
    A call that fails after that can only cut it, which clients take as a reason to ask again.
    """

    media_type = "application/json"

    async def _answer(self, gone: asyncio.Task[None], send: Send) -> Response | None:
        reply = self._delivery.reply
        waits: set[asyncio.Future[Any]] = {reply, gone}
        await asyncio.wait(waits, timeout=HOLD_WHOLE_S, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            return None
        if reply.done():
            refused = self._refused()
            if refused is not None:
                return refused
        await self._head(send)
        while not reply.done():
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.wait(
                waits, timeout=KEEP_ALIVE_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            if gone.done():
                return None
        try:
            said = reply.result()
        except RefusedError as error:
            log.info("%s: cut, because %s", self._delivery.call_id, error.code)
            return None  # without an end: the server closes the connection
        if said is not None:
            body = self._dialect.whole(self._request, said)
            await send({"type": "http.response.body", "body": body, "more_body": False})
            self._delivery.delivered()
        return None


class StreamedAnswer(Answer):
    """Sends text as it comes, signs of life while there is none, and the end once the call is
    recorded."""

    media_type = "text/event-stream; charset=utf-8"

    async def _answer(self, gone: asyncio.Task[None], send: Send) -> Response | None:
        delivery = self._delivery
        texts, reply = delivery.texts, delivery.reply
        assert texts is not None
        reply.add_done_callback(texts.wake)
        gone.add_done_callback(texts.wake)
        writer = self._dialect.events(self._request, delivery.call_id, delivery.prompt_tokens)
        started = False
        while True:
            if not (reply.done() or gone.done()):
                await texts.wait(KEEP_ALIVE_EVERY_S if started else HOLD_STREAM_S)
            if gone.done():
                return None
            # All that is there goes in one piece: each costs the server and the client a turn.
            ended, pieces, events = reply.done(), texts.take(), []
            if not started:
                refused = self._refused() if ended and not pieces else None
                if refused is not None:
                    return refused
                await self._head(send)
                events.append(writer.start())
                started = True
            elif not pieces and not ended:
                events.append(writer.alive())
            events += [writer.text(field, text) for field, text in pieces]
            if ended:
                events.append(self._end(writer))
            body = b"".join(events)
            await send({"type": "http.response.body", "body": body, "more_body": not ended})
            if ended:
                delivery.delivered()
                return None

    def _end(self, writer: EventWriter) -> bytes:
        try:
            reply = self._delivery.reply.result()
        except RefusedError as error:
            return writer.error(error)
        return writer.end(reply) if reply is not None else b""


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
