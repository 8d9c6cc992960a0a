"""What harnesses talk to: OpenAI's chat completions under one base URL per execution."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cells.gateway.answers import CallTask, StreamedAnswer, WholeAnswer, refusal
from cells.gateway.calls import RETRY_AFTER_S, LiveCall, Services
from cells.gateway.chat import read_request, write_models
from cells.gateway.forms import ChatRequest, RefusedError
from cells.gateway.kinds import by_headers, by_shape
from cells.gateway.matching import plan_call
from cells.gateway.sessions import Session, Sessions
from storage.objects import StorageError
from storage.records import RecordError

log = logging.getLogger(__name__)

BODY_LIMIT_S = 60.0


class PublicRoutes:
    """The routes under ``/e/{execution_id}/v1``.

    Args:
        body_limit: largest request body in bytes.
        calls_limit: most concurrent calls of an execution.
    """

    def __init__(
        self, services: Services, sessions: Sessions, *, body_limit: int, calls_limit: int
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._body_limit = body_limit
        self._calls_limit = calls_limit

    def routes(self) -> list[Route]:
        base = "/e/{execution_id}/v1"
        return [
            Route(f"{base}/chat/completions", self._chat, methods=["POST"]),
            Route(f"{base}/models", self._models, methods=["GET"]),
        ]

    async def _models(self, request: Request) -> Response:
        try:
            await self._recover(request)
            self._session(request)
        except RefusedError as error:
            return self._refuse(error)
        return Response(write_models(["policy"]), media_type="application/json")

    async def _chat(self, request: Request) -> Response:
        try:
            await self._recover(request)
            self._session(request)
            chat = read_request(await self._body(request))
            # Once more: the execution may have been closed while its body came in.
            return self._start(self._session(request), chat, request)
        except RefusedError as error:
            return self._refuse(error)
        except ClientDisconnect:
            return Response(status_code=400)

    def _start(self, session: Session, chat: ChatRequest, request: Request) -> Response:
        if len(session.running) >= self._calls_limit:
            raise RefusedError(
                429,
                "too_many_calls",
                f"{self._calls_limit} calls of this execution are running",
                retry_after_s=1,
            )
        texts: asyncio.Queue[tuple[str, str] | None] | None = None
        if chat.stream:
            texts = asyncio.Queue()
        call = self._call(session, chat, request, texts)
        task: CallTask = asyncio.create_task(call.run())
        session.running[call] = task
        task.add_done_callback(lambda done: _ended(session, call, done))
        if texts is None:
            return WholeAnswer(call, task, chat)
        return StreamedAnswer(call, task, chat, texts)

    def _call(
        self,
        session: Session,
        chat: ChatRequest,
        request: Request,
        texts: asyncio.Queue[tuple[str, str] | None] | None,
    ) -> LiveCall:
        branches = session.branches
        origin = by_headers(request.headers)
        node = branches.match(chat.messages, origin.agent if origin else None)
        if origin is None:
            origin = by_shape(chat, node, branches)
        try:
            plan = plan_call(branches, node, chat, origin.agent, self._services.codec)
        except ValueError as error:
            raise RefusedError(
                400, "invalid_value", f"messages: can't be rendered: {error}", param="messages"
            ) from None
        emit = (lambda field, text: texts.put_nowait((field, text))) if texts is not None else None
        return LiveCall(self._services, session, chat, plan, origin, emit)

    async def _recover(self, request: Request) -> None:
        try:
            await self._sessions.recover(request.path_params["execution_id"])
        except (StorageError, RecordError) as error:
            log.error("%s: %s", request.url.path, error)
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
        size = 0
        try:
            async with asyncio.timeout(BODY_LIMIT_S):
                async for part in request.stream():
                    size += len(part)
                    if size > self._body_limit:
                        raise RefusedError(
                            413,
                            "body_too_large",
                            f"the body is larger than {self._body_limit} bytes",
                        )
                    parts.append(part)
        except TimeoutError:
            raise RefusedError(
                408, "body_too_slow", f"the body took longer than {BODY_LIMIT_S:g} s"
            ) from None
        return b"".join(parts)

    def _refuse(self, error: RefusedError) -> Response:
        self._services.metrics.refused.labels(str(error.status)).inc()
        return refusal(error)


def _ended(session: Session, call: LiveCall, task: CallTask) -> None:
    session.running.pop(call, None)
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, RefusedError):
        log.error("%s failed", call.call_id, exc_info=error)
