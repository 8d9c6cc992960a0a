"""What harnesses talk to: three dialects under one base URL per execution."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cells.gateway.answers import EVENTS, JSON, StreamedAnswer, WholeAnswer, refuse
from cells.gateway.calls import RETRY_AFTER_S
from cells.gateway.dialects import models
from cells.gateway.dialects.chat import ChatDialect
from cells.gateway.dialects.dialect import Dialect
from cells.gateway.dialects.messages import MessagesDialect
from cells.gateway.dialects.responses import ResponsesDialect
from cells.gateway.exchange import Exchange
from cells.gateway.forms import RefusedError
from cells.gateway.intake import Intake
from cells.gateway.metrics import Metrics
from cells.gateway.sessions import Session, Sessions
from storage.objects import StorageError
from storage.records import RecordError

log = logging.getLogger(__name__)

BASE = "/e/"
CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()
_MODEL = "v1/models/"

Handler = Callable[[Exchange, Session, Dialect], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Path:
    """What is served at a path; without a dialect of its own it is answered in the client's."""

    method: str
    dialect: Dialect | None
    handler: Handler


class Public:
    """Answers everything under ``/e/{execution_id}``.

    Args:
        intake: starts calls.
        body_limit: largest request body in bytes.
        header_limit: largest headers of a request in bytes, all together.
    """

    def __init__(
        self,
        intake: Intake,
        metrics: Metrics,
        sessions: Sessions,
        *,
        body_limit: int,
        header_limit: int,
    ) -> None:
        self._intake = intake
        self._metrics = metrics
        self._sessions = sessions
        self.body_limit = body_limit
        self._header_limit = header_limit
        self._paths = {
            "v1/chat/completions": Path("POST", CHAT, self._call),
            "v1/responses": Path("POST", RESPONSES, self._call),
            "v1/responses/input_tokens": Path("POST", RESPONSES, self._count),
            "v1/messages": Path("POST", MESSAGES, self._call),
            "v1/messages/count_tokens": Path("POST", MESSAGES, self._count),
            "v1/models": Path("GET", None, _list_models),
        }

    def takes(self, path: str) -> bool:
        """Whether it is asked for here."""
        return path.startswith(BASE)

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request, to the end or until its client has gone; errors in the dialect of the
        path.

        Raises:
            ClientGoneError: before its body was there.
        """
        _, rest = _split(exchange.path)
        if rest == "api/hello" and exchange.method in ("GET", "HEAD"):
            exchange.send_whole(200, [JSON], b"{}")
            return
        path = self._path(rest)
        dialect = (path and path.dialect) or _dialect_of(exchange)
        try:
            if path is None:
                raise RefusedError(404, "not_found", "nothing is served at this path")
            if exchange.method not in (path.method, "HEAD" if path.method == "GET" else ""):
                text = f"only {path.method} is served here"
                raise RefusedError(405, "method_not_allowed", text)
            if exchange.headers_size > self._header_limit:
                text = f"the headers are larger than {self._header_limit} bytes together"
                raise RefusedError(431, "headers_too_large", text)
            await self._recover(exchange)
            await path.handler(exchange, self._session(exchange), dialect)
        except RefusedError as error:
            self._metrics.refused.labels(str(error.status)).inc()
            refuse(exchange, dialect, error)

    def _path(self, path: str) -> Path | None:
        if path.startswith(_MODEL):
            return Path("GET", None, _show_model)
        return self._paths.get(path)

    async def _call(self, exchange: Exchange, session: Session, dialect: Dialect) -> None:
        chat = dialect.read(await exchange.read(), session.seen)
        # Once more: the execution may have been closed while its body came in.
        session = self._session(exchange)
        try:
            delivery = await self._intake.start(session, chat, exchange.headers)
        except RefusedError as error:
            if not dialect.refuses_in_stream(chat, error):
                raise
            writer = dialect.events(chat, secrets.token_hex(8), 0)
            exchange.send_whole(200, [EVENTS], writer.start() + writer.error(error))
            return
        kind = StreamedAnswer if chat.stream else WholeAnswer
        await kind(exchange, dialect, delivery, chat).give()

    async def _count(self, exchange: Exchange, session: Session, dialect: Dialect) -> None:
        chat = dialect.read(await exchange.read(), session.seen)
        tokens = self._intake.count(self._session(exchange), chat, exchange.headers)
        exchange.send_whole(200, [JSON], models.counted(dialect.name, tokens))

    async def _recover(self, exchange: Exchange) -> None:
        try:
            await self._sessions.recover(_split(exchange.path)[0])
        except (StorageError, RecordError) as error:
            log.error("%s: %s", exchange.path, error)
            raise RefusedError(
                503, "storage", "what was recorded can't be read", retry_after_s=RETRY_AFTER_S
            ) from None

    def _session(self, exchange: Exchange) -> Session:
        headers = exchange.headers
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        return self._sessions.find(_split(exchange.path)[0], key)


def _split(path: str) -> tuple[str, str]:
    """The execution that a path names, and what follows it."""
    execution_id, _, rest = path.removeprefix(BASE).partition("/")
    return execution_id, rest


def _dialect_of(exchange: Exchange) -> Dialect:
    """The dialect where a path does not tell: Anthropic's clients always send their version."""
    return MESSAGES if "anthropic-version" in exchange.headers else CHAT


async def _list_models(exchange: Exchange, session: Session, dialect: Dialect) -> None:
    exchange.send_whole(200, [JSON], models.listed(dialect.name))


async def _show_model(exchange: Exchange, session: Session, dialect: Dialect) -> None:
    name = _split(exchange.path)[1].removeprefix(_MODEL)
    exchange.send_whole(200, [JSON], models.shown(dialect.name, name))
