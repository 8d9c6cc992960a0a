"""What harnesses talk to: three dialects under one base URL per execution."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cells.gateway.answers import StreamedAnswer, WholeAnswer, refusal
from cells.gateway.calls import RETRY_AFTER_S
from cells.gateway.dialects import models
from cells.gateway.dialects.chat import ChatDialect
from cells.gateway.dialects.dialect import Dialect
from cells.gateway.dialects.messages import MessagesDialect
from cells.gateway.dialects.responses import ResponsesDialect
from cells.gateway.forms import RefusedError
from cells.gateway.intake import Intake
from cells.gateway.metrics import Metrics
from cells.gateway.sessions import Session, Sessions
from storage.objects import StorageError
from storage.records import RecordError

log = logging.getLogger(__name__)

BODY_LIMIT_S = 60.0
BASE = "/e/"
EVENTS = "text/event-stream"
CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()
_MODEL = "v1/models/"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as far as it is read before its body.

    ``path`` is what follows the execution's id. Names in ``headers`` are in lower case; of those
    that are given twice, the first one counts.
    """

    execution_id: str
    path: str
    method: str
    headers: dict[str, str]
    headers_size: int
    receive: Receive

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> Asked:
        execution_id, _, path = scope["path"].removeprefix(BASE).partition("/")
        raw = scope["headers"]
        return cls(
            execution_id=execution_id,
            path=path,
            method=scope["method"],
            headers={
                name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)
            },
            headers_size=sum(len(name) + len(value) for name, value in raw),
            receive=receive,
        )

    @property
    def dialect(self) -> Dialect:
        """The dialect where a path does not tell: Anthropic's clients always send their version."""
        return MESSAGES if "anthropic-version" in self.headers else CHAT


@dataclass(frozen=True, slots=True)
class Path:
    """What is served at a path; without a dialect of its own it is answered in the client's."""

    method: str
    dialect: Dialect | None
    handler: Callable[[Asked, Session], Awaitable[ASGIApp]]


class PublicApp:
    """The application under ``/e/{execution_id}``, in front of another that has all else.

    It reads the scope itself: a router, its middleware and a request object would cost a call as
    much as its engine's connection does.

    Args:
        intake: starts calls.
        body_limit: largest request body in bytes.
        header_limit: largest headers of a request in bytes, all together.
    """

    def __init__(
        self,
        rest: ASGIApp,
        intake: Intake,
        metrics: Metrics,
        sessions: Sessions,
        *,
        body_limit: int,
        header_limit: int,
    ) -> None:
        self._rest = rest
        self._intake = intake
        self._metrics = metrics
        self._sessions = sessions
        self._body_limit = body_limit
        self._header_limit = header_limit
        self._paths = {
            "v1/chat/completions": self._calls(CHAT),
            "v1/responses": self._calls(RESPONSES),
            "v1/responses/input_tokens": self._counts(RESPONSES),
            "v1/messages": self._calls(MESSAGES),
            "v1/messages/count_tokens": self._counts(MESSAGES),
            "v1/models": Path("GET", None, _list_models),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(BASE):
            await self._rest(scope, receive, send)
            return
        answer = await self._answer(Asked.of(scope, receive))
        await answer(scope, receive, send)

    async def _answer(self, asked: Asked) -> ASGIApp:
        """The answer, with errors in the dialect of the path."""
        if asked.path == "api/hello" and asked.method in ("GET", "HEAD"):
            return Response(b"{}", media_type="application/json")
        path = self._path(asked.path)
        try:
            if path is None:
                raise RefusedError(404, "not_found", "nothing is served at this path")
            if asked.method not in (path.method, "HEAD" if path.method == "GET" else path.method):
                text = f"only {path.method} is served here"
                raise RefusedError(405, "method_not_allowed", text)
            if asked.headers_size > self._header_limit:
                text = f"the headers are larger than {self._header_limit} bytes together"
                raise RefusedError(431, "headers_too_large", text)
            await self._recover(asked.execution_id)
            return await path.handler(asked, self._session(asked))
        except RefusedError as error:
            self._metrics.refused.labels(str(error.status)).inc()
            return refusal((path and path.dialect) or asked.dialect, error)
        except ClientDisconnect:
            return Response(status_code=400)

    def _path(self, path: str) -> Path | None:
        if path.startswith(_MODEL):
            return Path("GET", None, _show_model)
        return self._paths.get(path)

    def _calls(self, dialect: Dialect) -> Path:
        async def call(asked: Asked, session: Session) -> ASGIApp:
            chat = dialect.read(await self._body(asked), session.seen)
            # Once more: the execution may have been closed while its body came in.
            session = self._session(asked)
            try:
                delivery = await self._intake.start(session, chat, asked.headers)
            except RefusedError as error:
                if not dialect.refuses_in_stream(chat, error):
                    raise
                writer = dialect.events(chat, secrets.token_hex(8), 0)
                return Response(writer.start() + writer.error(error), media_type=EVENTS)
            return (StreamedAnswer if chat.stream else WholeAnswer)(dialect, delivery, chat)

        return Path("POST", dialect, call)

    def _counts(self, dialect: Dialect) -> Path:
        async def count(asked: Asked, session: Session) -> ASGIApp:
            chat = dialect.read(await self._body(asked), session.seen)
            tokens = self._intake.count(self._session(asked), chat, asked.headers)
            return models.counted(dialect.name, tokens)

        return Path("POST", dialect, count)

    async def _recover(self, execution_id: str) -> None:
        try:
            await self._sessions.recover(execution_id)
        except (StorageError, RecordError) as error:
            log.error("%s: %s", execution_id, error)
            raise RefusedError(
                503, "storage", "what was recorded can't be read", retry_after_s=RETRY_AFTER_S
            ) from None

    def _session(self, asked: Asked) -> Session:
        headers = asked.headers
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        return self._sessions.find(asked.execution_id, key)

    async def _body(self, asked: Asked) -> bytes:
        """The body, within its limits of size and time.

        Raises:
            RefusedError: 413 or 408.
            ClientDisconnect: nobody is left to send the rest.
        """
        parts: list[bytes] = []
        size, limit = 0, self._body_limit
        try:
            async with asyncio.timeout(BODY_LIMIT_S):
                more = True
                while more:
                    message = await asked.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size > limit:
                        text = f"the body is larger than {limit} bytes"
                        raise RefusedError(413, "body_too_large", text)
                    parts.append(part)
        except TimeoutError:
            text = f"the body took longer than {BODY_LIMIT_S:g} s"
            raise RefusedError(408, "body_too_slow", text) from None
        return b"".join(parts)


async def _list_models(asked: Asked, session: Session) -> ASGIApp:
    return models.listed(asked.dialect.name)


async def _show_model(asked: Asked, session: Session) -> ASGIApp:
    return models.shown(asked.dialect.name, asked.path.removeprefix(_MODEL))
