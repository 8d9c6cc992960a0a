"""A server with SGLang's ``/generate`` and ``/abort_request`` that plays scripted ids.

One ``Script`` can be shared by several engines: a prompt that begins with a known prompt and part
of its reply gets the rest of that reply, with the same log-probs, as the same model would.

``python -m tests.engines.scripted --reply 5,6,7`` serves as a process and prints its address: every
prompt gets the same reply, in chunks as SGLang streams them.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop
from aiohttp import web


def logprob(position: int, token: int) -> float:
    """The log-prob that every engine gives to ``token`` at ``position`` of its context."""
    return -((token * 31 + position * 17) % 97 + 1) / 100


class Script:
    """Replies by prompt; a prompt that is not known takes the next one in line."""

    def __init__(self) -> None:
        self.queue: deque[list[int]] = deque()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def say(self, *replies: list[int]) -> None:
        self.queue.extend(replies)

    def forget(self) -> None:
        """The prompts that were answered."""
        self._known.clear()

    def rest(self, prompt: list[int]) -> list[int]:
        for known, reply in self._known.items():
            done = len(prompt) - len(known)
            if 0 < done <= len(reply) and prompt == [*known, *reply[:done]]:
                return reply[done:]
        reply = self.queue.popleft()
        self._known[tuple(prompt)] = reply
        return reply


class Parrot:
    """``/generate`` that says the same to every prompt, and reads of a request only what it needs:
    what measures a gateway must cost less than a gateway."""

    def __init__(self, reply: list[int], every: int) -> None:
        self._reply = reply
        self._every = every
        meta = self._meta(0, len(reply), {"type": "stop", "matched": reply[-1]})
        self._whole = orjson.dumps({"text": "", "meta_info": meta})
        self._chunks = [
            b"data: " + orjson.dumps({"text": "", "meta_info": meta}) + b"\n\n"
            for meta in self._metas()
        ]
        self._chunks[-1] += b"data: [DONE]\n\n"

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if re.search(rb'"stream": ?true', body) is None:
            return web.Response(body=self._whole, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self._chunks:
            await response.write(chunk)
        return response

    def _metas(self) -> list[dict[str, Any]]:
        ends = [*range(self._every, len(self._reply), self._every), len(self._reply)]
        stop = {"type": "stop", "matched": self._reply[-1]}
        return [
            self._meta(start, end, stop if end == len(self._reply) else None)
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def _meta(self, start: int, end: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        rows = [[logprob(at, token), token, None] for at, token in enumerate(self._reply)]
        return {
            "finish_reason": reason,
            "output_token_logprobs": rows[start:end],
            "output_token_logprobs_length": end,
            "weight_versions": [{"version": "0", "start": 0, "end": end}],
            "cached_tokens": 0,
        }


@dataclass
class _Running:
    rid: str
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """One engine.

    Args:
        incremental: whether streamed chunks hold only what is new.

    Attributes:
        delay_s: before the first token of a generation, and before each further chunk.
        hold_after: tokens after which a generation stands still until ``release`` is set.
        fail: what the next requests do instead: ``500``, ``400``, ``drop`` (connection cut where it
            stands still, or at once) or ``deaf`` (ignores its first abort).
        requests: bodies of all ``/generate`` requests.
        reached: set when a generation stands still.
        written: whether all pages are; it refuses to attach its storage until then.
        probes: how often that was asked for.
    """

    def __init__(self, script: Script, *, version: int = 0, incremental: bool = False) -> None:
        self.script = script
        self.version = version
        self.incremental = incremental
        self.delay_s = (0.0, 0.0)
        self.hold_after: int | None = None
        self.release = asyncio.Event()
        self.reached = asyncio.Event()
        self.fail: deque[str] = deque()
        self.requests: list[dict[str, Any]] = []
        self.aborts: list[str] = []
        self.written = True
        self.probes = 0
        self.url = ""
        self._running: dict[str, _Running] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_put("/hicache/storage-backend", self._attach)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _abort(self, request: web.Request) -> web.Response:
        rid = orjson.loads(await request.read())["rid"]
        self.aborts.append(rid)
        if self.fail and self.fail[0] == "deaf":
            self.fail.popleft()
            return web.Response()
        for running in self._running.values():
            if running.rid.startswith(rid):
                running.aborted.set()
        return web.Response()

    async def _attach(self, request: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=200 if self.written else 400)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        failing = self.fail[0] if self.fail else None
        if failing in ("500", "400"):
            self.fail.popleft()
            return web.json_response({"error": {"message": "scripted"}}, status=int(failing))
        running = _Running(body["rid"])
        self._running[running.rid] = running
        try:
            return await self._play(request, body, running)
        finally:
            del self._running[running.rid]

    async def _play(
        self, request: web.Request, body: dict[str, Any], running: _Running
    ) -> web.StreamResponse:
        prompt = body["input_ids"]
        limit = body["sampling_params"]["max_new_tokens"]
        script = self.script.rest(prompt)
        ids = script[:limit]
        reason: dict[str, Any] = {"type": "stop", "matched": ids[-1] if ids else None}
        if len(script) > limit:
            reason = {"type": "length", "length": limit}
        response: web.StreamResponse | None = None
        if body["stream"]:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
        done = 0
        await self._delay(running, 0)
        if self.hold_after is not None and self.hold_after < len(ids):
            done = self.hold_after
            if response is not None:
                for end in range(1, done + 1):
                    await response.write(self._event(prompt, ids, end - 1, end, None))
            self.reached.set()
            if not await self._stand_still(running):
                assert request.transport is not None
                request.transport.close()
                return response or web.Response()
        if running.aborted.is_set():
            ids, reason = ids[:done], {"type": "abort", "message": "Aborted"}
        if response is None:
            return web.json_response(self._answer(prompt, ids, 0, len(ids), reason))
        for end in range(done + 1, len(ids)):
            await self._delay(running, 1)
            if running.aborted.is_set():
                ids, reason = ids[: end - 1], {"type": "abort", "message": "Aborted"}
                break
            await response.write(self._event(prompt, ids, end - 1, end, None))
        await response.write(self._event(prompt, ids, max(done, len(ids) - 1), len(ids), reason))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _delay(self, running: _Running, which: int) -> None:
        """As long as this engine takes, or until the abort."""
        if self.delay_s[which]:
            with suppress(TimeoutError):
                await asyncio.wait_for(running.aborted.wait(), self.delay_s[which])

    async def _stand_still(self, running: _Running) -> bool:
        """Until released or aborted; False when the script cuts the connection."""
        if self.fail and self.fail[0] == "drop":
            self.fail.popleft()
            return False
        waits = [asyncio.create_task(e.wait()) for e in (self.release, running.aborted)]
        await asyncio.wait(waits, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return True

    def _event(
        self, prompt: list[int], ids: list[int], start: int, end: int, reason: dict | None
    ) -> bytes:
        start = start if self.incremental else 0
        return b"data: " + orjson.dumps(self._answer(prompt, ids, start, end, reason)) + b"\n\n"

    def _answer(
        self, prompt: list[int], ids: list[int], start: int, end: int, reason: dict | None
    ) -> dict[str, Any]:
        rows = [[logprob(len(prompt) + at, ids[at]), ids[at], None] for at in range(start, end)]
        version = str(self.version)
        return {
            "text": "",
            "output_ids": ids[start:end],
            "meta_info": {
                "finish_reason": reason,
                "output_token_logprobs": rows,
                "output_token_logprobs_length": end,
                "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": end}],
                "cached_tokens": len(prompt) - 1,
                "prompt_tokens": len(prompt),
                "completion_tokens": end,
            },
        }


async def _serve(reply: list[int], every: int) -> None:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/generate", Parrot(reply, every).generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply", required=True, help="ids, with commas between")
    parser.add_argument("--every", type=int, default=16, help="tokens of a chunk")
    arguments = parser.parse_args()
    uvloop.run(_serve([int(one) for one in arguments.reply.split(",")], arguments.every))


if __name__ == "__main__":
    main()
