"""Requests that a client sends again, and answers that it did not get.

A request is a **resend** when an equal one of the same agent (``stream`` left out, so that a client
may ask again for the whole) was not answered as far as anybody knows:

- it runs, and the client that asked is gone: the new one attaches. The generation goes on for
  ``GRACE_S`` without anybody, which is longer than the first pause of every known client, and is
  then aborted and recorded as abandoned;
- it is recorded, and the connection broke before the end was handed over, or the gateway was
  replaced before it could know: the recorded answer is given;
- the client itself says that it tries again (``x-stainless-retry-count``).

Everything else is a **repeat** and sampled anew: an equal request beside one whose client still
waits (several samples of one question), one after the answer was handed over whole (the same
question again), and one of another agent. An agent that asks something new has moved on: what it
did not get is no longer kept for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from cells.gateway.forms import Reply
from cells.gateway.waking import Waker

GRACE_S = 2.0


class Texts(Waker):
    """Pieces of text, as fields and texts, on their way to a client that streams."""

    def __init__(self, pieces: Iterable[tuple[str, str]]) -> None:
        super().__init__()
        self._pieces = list(pieces)

    def put(self, field: str, text: str) -> None:
        self._pieces.append((field, text))
        self.wake()

    def take(self) -> list[tuple[str, str]]:
        """All that came since the last time."""
        taken, self._pieces = self._pieces, []
        return taken

    async def wait(self, limit_s: float) -> None:
        """Until there is text, ``wake`` is called, or the limit."""
        if not self._pieces:
            await super().wait(limit_s)


class Generation(Protocol):
    """A running call, as far as its clients are concerned."""

    call_id: str
    prompt_tokens: int

    def abandon(self) -> None: ...


class Delivery:
    """A call as one client of it sees it.

    Attributes:
        reply: done with the reply, None when the call was abandoned, or the refusal.
        texts: pieces of text as they come, for a client that streams.
    """

    def __init__(self, shared: Shared, *, stream: bool) -> None:
        self._shared = shared
        self.call_id = shared.call_id
        self.prompt_tokens = shared.prompt_tokens
        self.reply = shared.reply
        self.texts: Texts | None = None
        if stream:
            self.texts = Texts(shared.pieces)
            shared.streams.add(self.texts)
        self._ended = False
        shared.join()

    def delivered(self) -> None:
        """The end of the answer was handed over."""
        self._leave(got=True)

    def abandon(self) -> None:
        """The client went away before it had the end."""
        self._leave(got=False)

    def _leave(self, *, got: bool) -> None:
        if not self._ended:
            self._ended = True
            if self.texts is not None:
                self._shared.streams.discard(self.texts)
            self._shared.leave(got=got)


class Shared:
    """An answer and those who wait for it."""

    def __init__(self, agent: str, key: str) -> None:
        self.agent = agent
        self.key = key
        self.call_id = ""
        self.prompt_tokens = 0
        self.pieces: list[tuple[str, str]] = []
        self.streams: set[Texts] = set()
        self.reply: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self.got = False
        """Whether some client has the whole answer."""
        self._generation: Generation | None = None
        self._clients = 0
        self._grace: asyncio.TimerHandle | None = None

    def carry(self, generation: Generation, task: asyncio.Future[Reply | None]) -> None:
        """Follow a call that now runs."""
        self._generation = generation
        self.call_id, self.prompt_tokens = generation.call_id, generation.prompt_tokens
        self.reply = task

    def ended(self) -> None:
        """The call has its reply, or none. It and this know each other, and cycles would be left to
        the collector, which holds up every call while it looks at thousands of them."""
        self._generation = None

    def emit(self, field: str, text: str) -> None:
        """Take a piece of text, for those who stream now and those who will."""
        self.pieces.append((field, text))
        for texts in self.streams:
            texts.put(field, text)

    @property
    def alone(self) -> bool:
        """Whether nobody waits for it."""
        return self._clients == 0

    def join(self) -> None:
        self._clients += 1
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def leave(self, *, got: bool) -> None:
        self._clients -= 1
        self.got = self.got or got
        if self.alone and not self.reply.done() and self._generation is not None:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(GRACE_S, self._generation.abandon)

    def give_up(self) -> None:
        """Nobody will come back for it."""
        if self._grace is not None:
            self._grace.cancel()
        if self._generation is not None:
            self._generation.abandon()


class Resends:
    """The answers of one execution that a client may still ask for."""

    def __init__(self) -> None:
        self._answers: dict[str, list[Shared]] = {}
        """By agent: those that run, and those that were recorded since it last asked anything new.
        """

    def find(self, agent: str, key: str, headers: Mapping[str, str]) -> Shared | None:
        """What this request has asked for before, if it is a resend."""
        says_so = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        for shared in reversed(self._answers.get(agent, ())):
            if (
                shared.key == key
                and not _failed(shared)
                and (says_so or (shared.alone and not shared.got))
            ):
                return shared
        return None

    def lonely(self, agent: str) -> list[Shared]:
        """Generations of an agent that nobody waits for."""
        running = self._answers.get(agent, ())
        return [shared for shared in running if shared.alone and not shared.reply.done()]

    def start(self, shared: Shared) -> None:
        """Take a new request, with which its agent has moved on from what was answered before."""
        running = [one for one in self._answers.get(shared.agent, ()) if not one.reply.done()]
        self._answers[shared.agent] = [*running, shared]

    def restore(self, agent: str, key: str, call_id: str, reply: Reply) -> None:
        """Take a recorded answer of which nobody knows whether it was delivered."""
        shared = Shared(agent, key)
        shared.call_id, shared.prompt_tokens = call_id, reply.usage.prompt
        shared.reply.set_result(reply)
        self._answers.setdefault(agent, []).append(shared)


def _failed(shared: Shared) -> bool:
    """Whether it ended without a reply."""
    task = shared.reply
    return task.done() and (
        task.cancelled() or task.exception() is not None or task.result() is None
    )
