"""One model call from its prompt to its record, over as many cells as it takes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cells.gateway.codec import Codec
from cells.gateway.engine import End, EngineRefusedError, Flight, Piece
from cells.gateway.forms import (
    ChatRequest,
    Finish,
    Message,
    RefusedError,
    Reply,
    ToolCall,
    Usage,
)
from cells.gateway.kinds import Origin
from cells.gateway.matching import Node, Plan, encode_ids
from cells.gateway.metrics import Metrics
from cells.gateway.recording import Recorder, Turn, make_node
from cells.gateway.routing import Cell, CellState, Places
from cells.gateway.sessions import Session
from cells.gateway.streaming import Gathered, TextStream, cut_at_stop
from cells.gateway.wire import Wire
from storage.objects import StorageError
from storage.records import Call, CallStatus, Served, VersionSpan

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Services:
    """What calls share. ``context`` is in tokens, ``call_limit_s`` counts waiting too."""

    codec: Codec
    wire: Wire
    recorder: Recorder
    places: Places
    metrics: Metrics
    context: int
    call_limit_s: float


class LiveCall:
    """A call that runs.

    Args:
        key: name that equal requests share.
        emit: takes pieces of text as they come, where the request is for a stream.
    """

    def __init__(
        self,
        services: Services,
        session: Session,
        request: ChatRequest,
        plan: Plan,
        origin: Origin,
        key: str,
        emit: Callable[[str, str], None],
    ) -> None:
        self._services = services
        self._session = session
        self._request = request
        self._plan = plan
        self._origin = origin
        self._key = key
        self.prompt_tokens = plan.tokens
        self.call_id, self._index = session.next_call()
        self._room = output_room(plan, request, services.context)
        self._text = (
            TextStream(services.codec, plan.new_ids, request.tools, request.sampling.stop, emit)
            if request.stream and not request.sampling.constraint
            else None
        )
        self._unread = Gathered(self._text.feed) if self._text else None
        self._gone = asyncio.Event()
        self._why: RefusedError | None = None
        self._flight: Flight | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int, int]] = []
        self._pieces = 0
        self._served: list[Served] = []
        self._cell = ""
        self._new_ids = b""
        """As JSON."""
        self._waited = 0.0
        self._started_at = time.time()
        self._started = time.monotonic()
        self._deadline = self._started + services.call_limit_s

    def abandon(self, why: RefusedError | None = None) -> None:
        """Stop, and record what was sampled as never delivered.

        Args:
            why: what the client is told; None when it is gone.
        """
        self._why = self._why or why
        self._gone.set()
        if self._unread is not None:
            self._unread.drop()
        if self._flight is not None:
            self._flight.abort()

    async def run(self) -> Reply | None:
        """Generate and record; None when the client went away.

        Raises:
            RefusedError: 503 when nothing served in time or storage refused, 400 when the engine
                calls the request wrong, or what ``abandon`` was told. What was sampled until then
                is recorded as abandoned.
        """
        try:
            end = await self._generate()
        except RefusedError as error:
            await self._record(CallStatus.ABANDONED, error.code, None)
            raise
        if self._gone.is_set():
            await self._record(CallStatus.ABANDONED, "abandoned", None)
            if self._why is not None:
                raise self._why
            return None
        reply = self._reply(end)
        await self._record(CallStatus.COMPLETE, reply.finish.value, reply)
        return reply

    async def _generate(self) -> End:
        prompt = self._plan.parts()
        self._new_ids = prompt[-1]
        losses = 0
        while len(self._ids) < self._room and not self._gone.is_set():
            cell = await self._place()
            if cell is None:
                break
            self._flight = flight = Flight(
                self._services.wire,
                cell,
                [*prompt, encode_ids(self._ids)] if self._ids else prompt,
                self._sampling(),
                self._progress if self._text else None,
            )
            try:
                piece = await flight.run(self._left())
            except EngineRefusedError as error:
                raise RefusedError(400, "engine_refused", str(error)) from None
            finally:
                self._flight = None  # it knows this call: a cycle, which only a collection ends
            self._take(piece, cell)
            if self._stopped_across():
                return End.STOP
            if piece.end in (End.STOP, End.LENGTH):
                return piece.end
            if self._ids and self._ids[-1] in self._services.codec.stop_ids:
                return End.STOP  # aborted, but its turn was over
            if self._gone.is_set():
                break
            if self._request.sampling.constraint:
                self._forget()  # its grammar begins anew
            self._services.metrics.reroutes.labels(piece.end.value).inc()
            log.info(
                "%s: %s after %d ids: %s", self.call_id, piece.end, len(piece.ids), piece.detail
            )
            if (
                cell.state is CellState.SERVING
                and self._services.places.held(self._session.execution_id) is cell
            ):
                # Nobody took the cell away, so its engine is at fault or restarts.
                if losses:
                    self._services.places.avoid(self._session.execution_id, cell)
                await self._pause(min(FIRST_PAUSE_S * 2**losses, LONGEST_PAUSE_S))
                losses += 1
        return End.LENGTH

    async def _place(self) -> Cell | None:
        """The cell to go to, waiting for one if need be; None when the client went away.

        Raises:
            RefusedError: 503, no cell within the call's limit.
        """
        places, record = self._services.places, self._session.record
        if self._left() <= 0:
            limit = self._services.call_limit_s
            raise _unavailable(f"not finished within the limit of {limit:g} s for one call")
        cell = places.held(record.execution_id)
        if cell is not None:
            return cell
        place = places.place(record.execution_id, record.policy_version, record.newer)
        task = asyncio.create_task(place)
        await self._wait({task})
        if task.done():
            return task.result()
        task.cancel()
        if self._gone.is_set():
            return None
        raise _unavailable(places.explain(record.policy_version))

    async def _pause(self, seconds: float) -> None:
        await self._wait(set(), min(seconds, self._left()))

    async def _wait(self, tasks: set[asyncio.Task[Cell]], limit_s: float | None = None) -> None:
        """Wait for a task, the client's going or the limit, on the execution's wait clock."""
        start = time.monotonic()
        gone = asyncio.create_task(self._gone.wait())
        waits: set[asyncio.Task[Any]] = {*tasks, gone}
        with self._session.clock.waiting():
            await asyncio.wait(
                waits,
                timeout=self._left() if limit_s is None else limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        gone.cancel()
        self._waited += time.monotonic() - start

    @property
    def _cached(self) -> int:
        return self._served[0].cached_tokens if self._served else 0

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _sampling(self) -> dict[str, Any]:
        """Sampling parameters in SGLang's names. Special tokens and stops are kept in its text, and
        stop tokens in its ids, which is all that is read."""
        asked = self._request.sampling
        temperature = self._session.record.temperature
        sampling: dict[str, Any] = {
            "max_new_tokens": self._room - len(self._ids),
            "temperature": temperature if asked.temperature is None else asked.temperature,
            "top_p": asked.top_p,
            "stop_token_ids": list(self._services.codec.stop_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if asked.stop:
            sampling["stop"] = list(asked.stop)
        if asked.seed is not None:
            sampling["sampling_seed"] = asked.seed
        if asked.constraint:
            sampling.update(asked.constraint)
        return sampling

    def _progress(self, ids: list[int]) -> None:
        assert self._unread is not None
        if not self._gone.is_set():
            self._unread.put(ids)

    def _take(self, piece: Piece, cell: Cell) -> None:
        offset = len(self._ids)
        self._ids += piece.ids
        self._logprobs += piece.logprobs
        for version, start, end in piece.spans:
            if self._spans and self._spans[-1][0] == version:
                self._spans[-1] = (version, self._spans[-1][1], offset + end)
            else:
                self._spans.append((version, offset + start, offset + end))
        if piece.ids:
            self._cell = cell.name
        metrics, given = self._services.metrics, self._plan.tokens + offset
        metrics.cached_tokens.inc(piece.cached_tokens)
        if self._served:
            metrics.rerouted_tokens.inc(given)
            metrics.rerouted_cached_tokens.inc(piece.cached_tokens)
        self._served.append(
            Served(cell=cell.name, prompt_tokens=given, cached_tokens=piece.cached_tokens)
        )

    def _stopped_across(self) -> bool:
        """Whether a stop text is in what several cells sampled; what came after it is cut off.

        No engine sees one that began on another cell.
        """
        stops = self._request.sampling.stop
        self._pieces += 1
        if self._pieces == 1 or not stops or not self._has_stop(len(self._ids)):
            return False
        end = bisect_left(range(len(self._ids)), True, key=lambda at: self._has_stop(at + 1)) + 1
        self._ids, self._logprobs = self._ids[:end], self._logprobs[:end]
        self._spans = [
            (version, start, min(stop, end)) for version, start, stop in self._spans if start < end
        ]
        return True

    def _has_stop(self, tokens: int) -> bool:
        text = self._services.codec.decode(self._ids[:tokens])
        return any(stop in text for stop in self._request.sampling.stop)

    def _forget(self) -> None:
        self._ids, self._logprobs, self._spans = [], [], []
        self._pieces = 0

    def _reply(self, end: End) -> Reply:
        parsed = self._services.codec.parse(self._ids, self._plan.new_ids, self._request.tools)
        content, stop = cut_at_stop(parsed.content, self._request.sampling.stop)
        reasoning = parsed.reasoning or ""
        if self._text is not None:
            reasoning, content = self._text.finish(reasoning, content)
        calls = tuple(
            ToolCall(f"call_{secrets.token_hex(8)}_{number}", name, arguments)
            for number, (name, arguments) in enumerate(parsed.calls)
        )
        finish = Finish.TOOL_CALLS if calls else Finish.STOP
        if end is End.LENGTH and stop is None:
            finish = Finish.LENGTH
        return Reply(
            call_id=self.call_id,
            content=content,
            reasoning=reasoning or None,
            tool_calls=calls,
            finish=finish,
            usage=Usage(self._plan.tokens, self._cached, len(self._ids)),
            stop_text=stop,
        )

    async def _record(self, status: CallStatus, finish: str, reply: Reply | None) -> None:
        """Keep the call, before its answer is complete.

        Raises:
            RefusedError: 503, storage refused.
        """
        if self._unread is not None:
            self._unread.drop()  # a client gets what is recorded, and no more
        plan, session = self._plan, self._session
        call = Call(
            call_id=self.call_id,
            execution_id=session.execution_id,
            index=self._index,
            parent=plan.parent.call_id if plan.parent else None,
            kept=plan.kept,
            new_ids=tuple(plan.new_ids),
            output_ids=tuple(self._ids),
            output_logprobs=tuple(self._logprobs),
            spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in self._spans),
            kind=self._origin.kind,
            kind_reason=self._origin.reason,
            agent=self._origin.agent,
            parent_agent=self._origin.parent,
            status=status,
            finish_reason=finish,
            fork_reason=plan.fork_reason,
            started_at=self._started_at,
            waited_s=self._waited,
            seconds=time.monotonic() - self._started,
            cell=self._cell,
            cached_tokens=self._cached,
            served=tuple(self._served) if len(self._served) > 1 else (),
        )
        turn = self._turn(reply)
        try:
            await self._services.recorder.append(session.log, call, turn)
        except StorageError as error:
            log.error("%s: not recorded: %s", self.call_id, error)
            raise RefusedError(
                503, "storage", "the call can't be recorded", retry_after_s=RETRY_AFTER_S
            ) from None
        session.calls += 1
        self._services.places.note(session.execution_id, plan.tokens + len(self._ids))
        if turn is not None:
            self._plant(make_node(call, turn, plan.parent), status)
        self._count(call)

    def _turn(self, reply: Reply | None) -> Turn | None:
        """The messages of this call, if a client has its answer or may have a part of it."""
        sent: Message | None = reply.message() if reply else None
        if sent is None and self._text is not None:
            _, content = self._text.sent
            sent = {"role": "assistant", "content": content} if content else None
        if sent is None:
            return None
        return Turn(
            call_id=self.call_id,
            messages=self._plan.messages,
            reply=sent,
            tools=self._plan.tools,
            request=self._key,
            kept_text=_kept_text(self._plan.parent),
            prompt_tokens=self._plan.tokens,
            stop_text=reply.stop_text if reply else None,
        )

    def _plant(self, node: Node, status: CallStatus) -> None:
        """Let later requests go on from this call."""
        node.remember([*self._request.messages, node.reply])
        node.keep_encoded(self._new_ids, encode_ids(self._ids))
        if status is CallStatus.COMPLETE:
            self._session.branches.add(node)
        else:
            node.shrink()
            self._session.branches.add_abandoned(node)

    def _count(self, call: Call) -> None:
        metrics, plan = self._services.metrics, self._plan
        metrics.calls.labels(call.kind.value, call.status.value).inc()
        metrics.prompt_tokens.inc(plan.tokens)
        metrics.new_tokens.inc(len(call.new_ids))
        metrics.output_tokens.inc(len(call.output_ids))
        metrics.seconds.observe(call.seconds)
        metrics.waited.inc(call.waited_s)
        metrics.total_calls += 1
        metrics.total_output += len(call.output_ids)
        if plan.fork is not None:
            metrics.forks.labels(plan.fork.value).inc()


def _kept_text(parent: Node | None) -> str | None:
    if parent is None or not (parent.part or parent.unsaid):
        return None
    return "" if parent.unsaid else str(parent.reply["content"])


def _unavailable(message: str) -> RefusedError:
    return RefusedError(503, "unavailable", message, retry_after_s=RETRY_AFTER_S)


def output_room(plan: Plan, request: ChatRequest, context: int) -> int:
    """Most tokens of the output: what was asked for, cut to what the context leaves.

    Raises:
        RefusedError: 400, the prompt alone fills the context.
    """
    left = context - plan.tokens
    if left <= 0:
        raise RefusedError(
            400,
            "context_length_exceeded",
            # Clients compact when they read either of these phrases.
            f"prompt is too long: {plan.tokens} tokens > {context} maximum; the maximum context "
            f"length of this policy is {context} tokens: shorten the messages",
            param="messages",
        )
    asked = request.sampling.max_tokens
    return left if asked is None else min(asked, left)
