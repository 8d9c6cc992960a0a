"""Answers of a call: whole or streamed, kept alive while it waits, given up when the client goes
away."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from cells.gateway.dialects.dialect import Dialect, EventWriter
from cells.gateway.exchange import Exchange, Header
from cells.gateway.forms import ChatRequest, RefusedError, Reply
from cells.gateway.resends import Delivery
from cells.gateway.waking import Waker

log = logging.getLogger(__name__)

HOLD_STREAM_S = 1.0
"""How long a stream waits for its first text before its headers go: until then a call that fails is
answered with a status, and from then on the client hears something."""
HOLD_WHOLE_S = 10.0
"""The same for an answer in one piece."""
KEEP_ALIVE_EVERY_S = 10.0
JSON: Header = (b"content-type", b"application/json")
EVENTS: Header = (b"content-type", b"text/event-stream; charset=utf-8")


def refuse(exchange: Exchange, dialect: Dialect, error: RefusedError) -> None:
    """Answer a refused request."""
    headers = [JSON]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
        headers.append((b"x-should-retry", b"true"))
    exchange.send_whole(dialect.status(error), headers, dialect.error(error))


class Answer(ABC):
    """What is common to both."""

    content_type: Header

    def __init__(
        self, exchange: Exchange, dialect: Dialect, delivery: Delivery, request: ChatRequest
    ) -> None:
        self._exchange = exchange
        self._dialect = dialect
        self._delivery = delivery
        self._request = request

    async def give(self) -> None:
        """Answer until the end, or until the client has gone."""
        try:
            refused = await self._answer()
            if refused is not None:
                refuse(self._exchange, self._dialect, refused)
                self._sent()
        finally:
            self._delivery.abandon()

    @abstractmethod
    async def _answer(self) -> RefusedError | None:
        """Send the answer; a refusal that can still have its status is returned instead."""

    def _said(self) -> Reply | RefusedError:
        """What became of a call that has ended."""
        try:
            reply = self._delivery.reply.result()
        except RefusedError as error:
            return error
        # Who asks for it now had no part in its end.
        return reply or RefusedError(499, "abandoned", "this call was given up")

    def _sent(self) -> None:
        """The end was handed over, if there still was somebody to take it."""
        if not self._exchange.disconnected:
            self._delivery.delivered()

    def _headers(self) -> list[Header]:
        call_id = self._delivery.call_id.encode()
        return [self.content_type, (b"cache-control", b"no-cache"), (b"x-request-id", call_id)]


class WholeAnswer(Answer):
    """Waits for the reply and sends it in one piece.

    After a while the headers go, and white space, which JSON may begin with, keeps the connection.
    A call that fails after that can only cut it, which clients take as a reason to ask again.
    """

    content_type = JSON

    async def _answer(self) -> RefusedError | None:
        exchange, reply, waker = self._exchange, self._delivery.reply, Waker()
        exchange.wake_when_gone(waker)
        reply.add_done_callback(waker.wake)
        started = False
        while not reply.done() and not exchange.disconnected:
            await waker.wait(KEEP_ALIVE_EVERY_S if started else HOLD_WHOLE_S)
            if reply.done() or exchange.disconnected:
                break
            if started:
                await exchange.send_part(b" ", last=False)
            else:
                exchange.send_head(200, self._headers(), b" ")
                started = True
        if exchange.disconnected:
            return None
        said = self._said()
        if isinstance(said, RefusedError):
            if started:  # without an end: the server closes the connection
                log.info("%s: cut, because %s", self._delivery.call_id, said.code)
            return None if started else said
        body = self._dialect.whole(self._request, said)
        if started:
            await exchange.send_part(body, last=True)
        else:
            exchange.send_whole(200, self._headers(), body)
        self._sent()
        return None


class StreamedAnswer(Answer):
    """Sends text as it comes, signs of life while there is none, and the end once the call is
    recorded."""

    content_type = EVENTS

    async def _answer(self) -> RefusedError | None:
        exchange, delivery = self._exchange, self._delivery
        texts, reply = delivery.texts, delivery.reply
        assert texts is not None
        exchange.wake_when_gone(texts)
        reply.add_done_callback(texts.wake)
        writer = self._dialect.events(self._request, delivery.call_id, delivery.prompt_tokens)
        started = False
        while True:
            if not (reply.done() or exchange.disconnected):
                await texts.wait(KEEP_ALIVE_EVERY_S if started else HOLD_STREAM_S)
            if exchange.disconnected:
                return None
            # All that is there goes in one piece: each costs the server and the client a turn.
            ended, pieces = reply.done(), texts.take()
            said = self._said() if ended else None
            if isinstance(said, RefusedError) and not started and not pieces:
                return said
            body = self._events(writer, pieces, said, started=started)
            if started:
                await exchange.send_part(body, last=ended)
            else:
                exchange.send_head(200, self._headers(), body, last=ended)
                started = True
            if ended:
                self._sent()
                return None

    def _events(
        self,
        writer: EventWriter,
        pieces: list[tuple[str, str]],
        said: Reply | RefusedError | None,
        *,
        started: bool,
    ) -> bytes:
        events = [] if started else [writer.start()]
        events += [writer.text(field, text) for field, text in pieces]
        if isinstance(said, RefusedError):
            events.append(writer.error(said))
        elif said is not None:
            events.append(writer.end(said))
        return b"".join(events) or writer.alive()
