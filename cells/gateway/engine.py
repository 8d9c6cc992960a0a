"""Generations on an SGLang server, with ids in and ids out.

What SGLang 0.5.23 answers at ``/generate`` (read in its source): ``meta_info`` has
``output_token_logprobs``, one ``[log-prob, id, text]`` per sampled token, the stop token included;
``weight_versions``, the spans of weight versions; ``cached_tokens``; ``finish_reason`` with type
``stop``, ``length`` or ``abort``. The log-probs are of the logits divided by the temperature: of
the sampling distribution, before ``top_p`` cuts it. Streamed chunks repeat all that came before
unless the server was started with ``--incremental-streaming-output``. ``/abort_request`` takes
every request whose id *begins* with the given one, so ids are random and of one length.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from cells.gateway.routing import Cell
from cells.gateway.wire import Wire

ABORT_EVERY_S = 0.25
ABORT_LIMIT_S = 5.0
ABORT_ANSWER_S = 1.0
STREAM_EVERY_TOKENS = 16
REFUSALS = (400, 413, 422)
"""Statuses that blame the request. All others are the server's or ours, and pass."""


class EngineRefusedError(RuntimeError):
    """The engine calls the request itself wrong; trying elsewhere would not help."""


class End(StrEnum):
    """How a generation on one cell ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    LOST = "lost"
    """The server failed or went away; what had been streamed is kept."""


@dataclass(slots=True)
class Piece:
    """What one cell sampled. ``spans`` are (version, start, end) of these ids."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    cached_tokens: int = 0
    end: End = End.LOST
    detail: str = ""


class Flight:
    """One generation on one cell.

    Args:
        wire: connections to engines.
        prompt: its ids as JSON, numbers with commas between, in parts.
        progress: called with new ids as they come; None does not stream, which costs the server
            and this process far less.
    """

    def __init__(
        self,
        wire: Wire,
        cell: Cell,
        prompt: list[bytes],
        sampling: dict[str, Any],
        progress: Callable[[list[int]], None] | None,
    ) -> None:
        self._wire = wire
        self._cell = cell
        self._url, self._token = cell.url, cell.token
        self._version = cell.version
        self._progress = progress
        self._rid = secrets.token_hex(16)
        self._piece = Piece()
        self._meta: dict[str, Any] = {}
        self._aborting: asyncio.Task[None] | None = None
        self._patience: asyncio.Timeout | None = None
        streamed = progress is not None
        if streamed:
            sampling = {**sampling, "stream_interval": STREAM_EVERY_TOKENS}
        head = orjson.dumps(
            {
                "rid": self._rid,
                "sampling_params": sampling,
                "return_logprob": True,
                "stream": streamed,
                # KV of other weights must never be taken for this prompt's.
                "extra_key": str(cell.version),
            }
        )
        self._body = [head[:-1] + b',"input_ids":[']
        for part in prompt:
            self._body += (part, b",")
        self._body[-1] = b"]}"
        self._rest = b""
        """What has come and not been read: the beginning of an event, or of the answer."""

    def abort(self) -> None:
        """Ask for an early end; ``run`` returns what was sampled."""
        if self._aborting is None and self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time() + ABORT_LIMIT_S)
            self._aborting = asyncio.create_task(self._abort())

    async def run(self, limit_s: float) -> Piece:
        """Generate until the end, an abort, or ``limit_s`` seconds (then as if aborted).

        Raises:
            EngineRefusedError: the server calls the request wrong.
        """
        self._cell.enter(self)
        limit = asyncio.get_running_loop().call_later(limit_s, self.abort)
        try:
            async with asyncio.timeout(None) as self._patience:
                await self._read()
        except TimeoutError:
            self._piece.end, self._piece.detail = End.ABORTED, "the abort was not answered"
        finally:
            limit.cancel()
            self._patience = None
            if self._aborting is not None:
                self._aborting.cancel()
            self._cell.leave(self)
        self._piece.spans = _spans(self._meta, len(self._piece.ids), self._version)
        return self._piece

    async def _abort(self) -> None:
        # The request may not have reached the scheduler yet, where an abort of it finds nothing:
        # so ask again until it ends, which ends this.
        body = [orjson.dumps({"rid": self._rid})]
        while True:
            with suppress(TimeoutError, OSError, ValueError):
                # A server that is going: reading ends by itself, or at the deadline.
                async with asyncio.timeout(ABORT_ANSWER_S):
                    await self._wire.post(self._url, "/abort_request", self._token, body, _ignore)
            await asyncio.sleep(ABORT_EVERY_S)

    async def _read(self) -> None:
        take = self._take_whole if self._progress is None else self._take_events
        try:
            status, text = await self._wire.post(
                self._url, "/generate", self._token, self._body, take
            )
            if status == 200:
                if self._progress is None:
                    self._take(orjson.loads(self._rest))
                return
            said = f"{status} {text.decode(errors='replace')}"
            if status in REFUSALS:
                raise EngineRefusedError(f"{self._cell.name}: {said}")
            self._lost(said)
        except (OSError, orjson.JSONDecodeError) as error:
            self._lost(repr(error))
        except (KeyError, TypeError, ValueError) as error:
            self._lost(f"answer is not of the expected form: {error!r}")

    def _take_whole(self, data: bytes) -> None:
        self._rest += data

    def _take_events(self, data: bytes) -> None:
        """Take the events that are whole by now; ``progress`` hears of them together."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        ids: list[int] = []
        for event in events:
            text = event.removeprefix(b"data: ").strip()
            if text and text != b"[DONE]":
                ids += self._take(orjson.loads(text))
        assert self._progress is not None
        self._progress(ids)

    def _lost(self, detail: str) -> None:
        self._piece.end, self._piece.detail = End.LOST, f"{self._cell.name}: {detail}"

    def _take(self, data: dict[str, Any]) -> list[int]:
        """Take a whole answer, or a chunk (cumulative or incremental, told apart by its length),
        and return the ids that are new."""
        if "error" in data:
            raise EngineRefusedError(f"{self._cell.name}: {data['error']}")
        self._meta = meta = data["meta_info"]
        rows = meta.get("output_token_logprobs") or []
        start = meta.get("output_token_logprobs_length", len(rows)) - len(rows)
        piece = self._piece
        if start > len(piece.ids):
            raise ValueError(f"tokens {len(piece.ids)} to {start} are missing")
        new = rows[len(piece.ids) - start :]
        logprobs = [float(row[0]) for row in new]
        if not math.isfinite(sum(logprobs)):
            raise ValueError("a log-probability is not finite")
        ids = [int(row[1]) for row in new]
        piece.ids += ids
        piece.logprobs += logprobs
        piece.cached_tokens = meta.get("cached_tokens") or 0
        reason = meta.get("finish_reason")
        if reason is not None:
            kind, piece.detail = reason["type"], str(reason.get("message", ""))
            if reason.get("status_code") in REFUSALS:
                raise EngineRefusedError(f"{self._cell.name}: {piece.detail}")
            piece.end = End.ABORTED if kind == "abort" else End(kind)
        return ids


def _spans(meta: dict[str, Any], total: int, declared: int) -> list[tuple[int, int, int]]:
    if not total:
        return []
    given = meta.get("weight_versions")
    if given:
        spans = [
            (_version(span["version"], declared), span["start"], min(span["end"], total))
            for span in given
        ]
        # The spans can lag behind the tokens by a chunk: the newest goes to the end.
        version, start, _ = spans[-1]
        return [*(span for span in spans[:-1] if span[1] < span[2]), (version, start, total)]
    return [(_version(meta.get("weight_version"), declared), 0, total)]


def _version(text: object, declared: int) -> int:
    """The engine's own word; ``default`` is what it says before its first update."""
    return int(text) if isinstance(text, str | int) and str(text).isdigit() else declared


def _ignore(data: bytes) -> None:
    """An answer that says nothing."""
