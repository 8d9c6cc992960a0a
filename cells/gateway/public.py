"""What harnesses talk to: three dialects under one base URL per execution."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cells.gateway import openapi
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
EVENTS = "text/event-stream"
CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()

Handler = Callable[[Request, Session], Awaitable[Response]]


class Anything(Convertor[str]):
    """The rest of a path, whatever is in it: Starlette's own ``path`` stops at the end of a line,
    and its answer to that is in nobody's dialect."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("anything", Anything())


class PublicRoutes:
    """The routes under ``/e/{execution_id}``, and the document that describes them.

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
        self._body_limit = body_limit
        self._header_limit = header_limit

    def routes(self) -> list[Route]:
        base = "/e/{execution_id}"
        chat, responses, messages = (
            f"{base}/v1/{path}" for path in ("chat/completions", "responses", "messages")
        )
        return [
            self._route(chat, "POST", CHAT, self._call(CHAT)),
            self._route(responses, "POST", RESPONSES, self._call(RESPONSES)),
            self._route(f"{responses}/input_tokens", "POST", RESPONSES, self._count(RESPONSES)),
            self._route(messages, "POST", MESSAGES, self._call(MESSAGES)),
            self._route(f"{messages}/count_tokens", "POST", MESSAGES, self._count(MESSAGES)),
            self._route(f"{base}/v1/models", "GET", None, _list_models),
            self._route(f"{base}/v1/models/{{model:anything}}", "GET", None, _show_model),
            Route(f"{base}/api/hello", _hello, methods=["GET"]),
            Route("/openapi.json", openapi.serve, methods=["GET"]),
            Route(f"{base}{{rest:anything}}", self._nothing, methods=_METHODS),
        ]

    def _route(self, path: str, method: str, dialect: Dialect | None, handler: Handler) -> Route:
        """A route whose errors are in its dialect, and whose handler gets the open session."""

        async def handle(request: Request) -> Response:
            spoken = dialect or _spoken(request)
            try:
                if request.method not in (method, "HEAD" if method == "GET" else method):
                    raise RefusedError(405, "method_not_allowed", f"only {method} is served here")
                _check_headers(request, self._header_limit)
                await self._recover(request)
                return await handler(request, self._session(request))
            except RefusedError as error:
                self._metrics.refused.labels(str(error.status)).inc()
                return refusal(spoken, error)
            except ClientDisconnect:
                return Response(status_code=400)

        return Route(path, handle, methods=_METHODS)

    def _call(self, dialect: Dialect) -> Handler:
        async def call(request: Request, session: Session) -> Response:
            chat = dialect.read(await self._body(request), session.seen)
            # Once more: the execution may have been closed while its body came in.
            session = self._session(request)
            try:
                delivery = await self._intake.start(session, chat, request.headers)
            except RefusedError as error:
                if not dialect.refuses_in_stream(chat, error):
                    raise
                writer = dialect.events(chat, secrets.token_hex(8), 0)
                return Response(writer.start() + writer.error(error), media_type=EVENTS)
            return (StreamedAnswer if chat.stream else WholeAnswer)(dialect, delivery, chat)

        return call

    def _count(self, dialect: Dialect) -> Handler:
        async def count(request: Request, session: Session) -> Response:
            chat = dialect.read(await self._body(request), session.seen)
            tokens = self._intake.count(self._session(request), chat, request.headers)
            return models.counted(dialect.name, tokens)

        return count

    async def _recover(self, request: Request) -> None:
        execution_id = request.path_params["execution_id"]
        try:
            await self._sessions.recover(execution_id)
        except (StorageError, RecordError) as error:
            log.error("%s: %s", execution_id, error)
            raise RefusedError(
                503, "storage", "what was recorded can't be read", retry_after_s=RETRY_AFTER_S
            ) from None

    def _session(self, request: Request) -> Session:
        key = request.headers.get("x-api-key") or request.headers.get(
            "authorization", ""
        ).removeprefix("Bearer ")
        return self._sessions.find(request.path_params["execution_id"], key)

    async def _body(self, request: Request) -> bytes:
        """The body, within its limits of size and time.

        Raises:
            RefusedError: 413 or 408.
        """
        parts: list[bytes] = []
        size, limit = 0, self._body_limit
        try:
            async with asyncio.timeout(BODY_LIMIT_S):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise RefusedError(
                            413, "body_too_large", f"the body is larger than {limit} bytes"
                        )
                    parts.append(part)
        except TimeoutError:
            raise RefusedError(
                408, "body_too_slow", f"the body took longer than {BODY_LIMIT_S:g} s"
            ) from None
        return b"".join(parts)

    async def _nothing(self, request: Request) -> Response:
        error = RefusedError(404, "not_found", "nothing is served at this path")
        self._metrics.refused.labels("404").inc()
        return refusal(_spoken(request), error)


_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def _spoken(request: Request) -> Dialect:
    """The dialect of a path that several share: Anthropic's clients always send their version."""
    return MESSAGES if "anthropic-version" in request.headers else CHAT


def _check_headers(request: Request, limit: int) -> None:
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > limit:
        raise RefusedError(
            431, "headers_too_large", f"the headers are larger than {limit} bytes together"
        )


async def _list_models(request: Request, session: Session) -> Response:
    return models.listed(_spoken(request).name)


async def _show_model(request: Request, session: Session) -> Response:
    return models.shown(_spoken(request).name, request.path_params["model"])


async def _hello(request: Request) -> Response:
    return Response(b"{}", media_type="application/json")
