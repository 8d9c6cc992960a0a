"""From a request in the internal form to the call that answers it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

import orjson

from cells.gateway.calls import RETRY_AFTER_S, LiveCall, Services
from cells.gateway.canonical import digest, message_key
from cells.gateway.forms import ChatRequest, RefusedError, Reply
from cells.gateway.grammar import Grammar
from cells.gateway.harnesses import HARNESSES
from cells.gateway.kinds import Origin, by_rules, by_shape
from cells.gateway.matching import Node, plan_call
from cells.gateway.resends import Delivery, Shared
from cells.gateway.sessions import Session

log = logging.getLogger(__name__)

GIVE_UP_LIMIT_S = 10.0


class Intake:
    """Starts calls, or finds the one that a request has asked for before.

    Args:
        calls_limit: most concurrent calls of an execution.
        total_limit: most concurrent calls of this process.
    """

    def __init__(self, services: Services, *, calls_limit: int, total_limit: int) -> None:
        self._services = services
        self._calls_limit = calls_limit
        self._total_limit = total_limit
        self._grammar = Grammar(services.codec)
        self._running = 0

    async def start(
        self, session: Session, chat: ChatRequest, headers: Mapping[str, str]
    ) -> Delivery:
        """The answer to a request.

        Raises:
            RefusedError: 400 when it can't be rendered or fills the context, 503 when too many
                calls run.
        """
        try:
            tools = session.tools_key(chat.tools)
            node, origin = self._place(session, chat, headers)
            key = request_key(chat, node, tools)
            shared = session.resends.find(origin.agent, key, headers)
            if shared is not None:
                self._services.metrics.resends.inc()
                return Delivery(shared, stream=chat.stream)
            if lonely := session.resends.lonely(origin.agent):
                # Its agent has moved on, perhaps with the part of an answer that it got.
                await _give_up(lonely)
                node, origin = self._place(session, chat, headers)
                key = request_key(chat, node, tools)
            return self._begin(session, chat, node, origin, tools, key)
        except ValueError as error:
            raise _unrendered(error) from None

    def count(self, session: Session, chat: ChatRequest, headers: Mapping[str, str]) -> int:
        """Tokens of the prompt that a request would have.

        Raises:
            RefusedError: 400, it can't be rendered.
        """
        try:
            node, origin = self._place(session, chat, headers)
            tools = session.tools_key(chat.tools)
            codec = self._services.codec
            return plan_call(session.branches, node, chat, origin.agent, tools, codec).tokens
        except ValueError as error:
            raise _unrendered(error) from None

    def _place(
        self, session: Session, chat: ChatRequest, headers: Mapping[str, str]
    ) -> tuple[Node | None, Origin]:
        branches = session.branches
        origin = by_rules(HARNESSES, headers, chat, branches)
        agent = origin.agent if origin else None
        node = branches.match(chat.messages, agent)
        if node is None:
            node = branches.match_part(chat.messages, agent, self._services.codec)
        return node, origin or by_shape(chat, node, branches)

    def _begin(
        self,
        session: Session,
        chat: ChatRequest,
        node: Node | None,
        origin: Origin,
        tools: str,
        key: str,
    ) -> Delivery:
        if session.closing:
            raise RefusedError(410, "execution_closed", "this execution has ended")
        self._admit(session)
        plan = plan_call(session.branches, node, chat, origin.agent, tools, self._services.codec)
        bound = self._grammar.bind(chat, plan.new_ids)
        if bound is not None:
            chat = replace(chat, sampling=replace(chat.sampling, constraint=bound))
        shared = Shared(origin.agent, key)
        call = LiveCall(self._services, session, chat, plan, origin, key, shared.emit)
        # From now on, not from its end: calls that come meanwhile are told apart by it.
        session.branches.roots.setdefault(origin.agent, chat.messages[0])
        task = asyncio.create_task(call.run())
        shared.carry(call, task)
        session.resends.start(shared)
        session.running[call] = task
        self._running += 1
        task.add_done_callback(lambda done: self._ended(session, call, shared, done))
        return Delivery(shared, stream=chat.stream)

    def _admit(self, session: Session) -> None:
        # Not 429: that ends some clients at once.
        if len(session.running) >= self._calls_limit:
            text = f"{self._calls_limit} calls of this execution are running"
            raise RefusedError(503, "too_many_calls", text, retry_after_s=1)
        if self._running >= self._total_limit:
            text = f"{self._total_limit} calls are running at this gateway"
            raise RefusedError(503, "overloaded", text, retry_after_s=RETRY_AFTER_S)

    def _ended(
        self, session: Session, call: LiveCall, shared: Shared, task: asyncio.Task[Reply | None]
    ) -> None:
        self._running -= 1
        shared.ended()
        session.running.pop(call, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RefusedError):
            log.error("%s failed", call.call_id, exc_info=error)


def _unrendered(error: ValueError) -> RefusedError:
    text = f"messages: can't be rendered: {error}"
    return RefusedError(400, "invalid_value", text, param="messages")


def request_key(chat: ChatRequest, node: Node | None, tools: str) -> str:
    """A name that requests share which ask for the same: the call that they go on from, what they
    add to it, their tools and how to sample. How it is to be sent does not count."""
    new = chat.messages[node.depth :] if node else chat.messages
    sampling = chat.sampling
    return digest(
        orjson.dumps(
            [
                node.call_id if node else None,
                node.depth if node else 0,
                [message_key(message) for message in new],
                tools,
                repr(sampling),
                repr(chat.tool_choice),
            ]
        )
    )


async def _give_up(lonely: list[Shared]) -> None:
    for shared in lonely:
        shared.give_up()
    await asyncio.wait([shared.reply for shared in lonely], timeout=GIVE_UP_LIMIT_S)
