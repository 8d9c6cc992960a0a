"""What harnesses talk to: OpenAI's chat completions under one base URL per execution."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cells.gateway.answers import StreamedAnswer, WholeAnswer, refusal
from cells.gateway.calls import RETRY_AFTER_S
from cells.gateway.chat import read_request, write_models
from cells.gateway.forms import RefusedError
from cells.gateway.intake import Intake
from cells.gateway.metrics import Metrics
from cells.gateway.sessions import Session, Sessions
from storage.objects import StorageError
from storage.records import RecordError

log = logging.getLogger(__name__)

BODY_LIMIT_S = 60.0


class PublicRoutes:
    """The routes under ``/e/{execution_id}/v1``.

    Args:
        body_limit: largest request body in bytes.
        intake: starts calls.
    """

    def __init__(
        self, intake: Intake, metrics: Metrics, sessions: Sessions, *, body_limit: int
    ) -> None:
        self._intake = intake
        self._metrics = metrics
        self._sessions = sessions
        self._body_limit = body_limit

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
            session = self._session(request)
            delivery = await self._intake.start(session, chat, request.headers)
        except RefusedError as error:
            return self._refuse(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return (StreamedAnswer if chat.stream else WholeAnswer)(delivery, chat)

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
        self._metrics.refused.labels(str(error.status)).inc()
        return refusal(error)
