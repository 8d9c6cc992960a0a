"""What the gateway is compared with: two small proxies in front of the same engine.

``python -m tests.benchmarks.gateway_peers passthrough ENGINE`` sends on what comes;
``python -m tests.benchmarks.gateway_peers bare ENGINE POLICY JOURNAL`` does what a gateway can't
leave out, for a client that never edits, branches, tries again or sends anything wrong.
Both print where they listen.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import orjson
import uvloop
from aiohttp import web
from tokenizers import Tokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
EVENTS = {"content-type": "text/event-stream"}


def passthrough(engine: str, http: aiohttp.ClientSession) -> Handler:
    """The least that a proxy does: one request in, one out, bytes as they come."""

    async def forward(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        async with http.post(f"{engine}/generate", data=data) as answer:
            response = web.StreamResponse(headers=EVENTS)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            return response

    return forward


class Bare:
    """Keeps each session's messages, and its ids as JSON; encodes only new messages; decodes the
    answer in one piece for each that comes; writes one line for each call."""

    def __init__(
        self, engine: str, http: aiohttp.ClientSession, tokenizer: Tokenizer, journal: BinaryIO
    ) -> None:
        self._url = f"{engine}/generate"
        self._http = http
        self._tokenizer = tokenizer
        self._journal = journal
        self._sessions: dict[str, tuple[list[dict[str, Any]], bytes]] = {}
        self._calls = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        key, messages = request.headers["authorization"], body["messages"]
        known, prompt = self._sessions.get(key, ([], b""))
        new = messages[len(known) :] if messages[: len(known)] == known else messages
        turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in new]
        text = f"{''.join(turns)}<|im_start|>assistant\n"
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        prompt = b",".join(part for part in (prompt, orjson.dumps(ids)[1:-1]) if part)
        self._calls += 1
        call_id = f"call{self._calls}"
        rows: list[Any] = []
        said = ""
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        asked = b'{"stream":true,"return_logprob":true,"input_ids":[' + prompt + b"]}"
        async with self._http.post(self._url, data=asked) as answer:
            rest = b""
            async for part in answer.content.iter_any():
                *events, rest = (rest + part).split(b"\n\n")
                fresh = [row for event in events for row in _rows(event)]
                rows += fresh
                piece = self._tokenizer.decode([row[1] for row in fresh], skip_special_tokens=False)
                said += piece
                await response.write(_event(call_id, {"content": piece}))
        call = orjson.loads(said.split("<tool_call>")[1].partition("</tool_call>")[0])
        arguments = orjson.dumps(call["arguments"]).decode()
        function = {"name": call["name"], "arguments": arguments}
        tool = {"index": 0, "id": call_id, "type": "function", "function": function}
        await response.write(_event(call_id, {"tool_calls": [tool]}) + b"data: [DONE]\n\n")
        output = [row[1] for row in rows]
        line = {"id": call_id, "new": ids, "output": output, "logprobs": [row[0] for row in rows]}
        self._journal.write(orjson.dumps(line) + b"\n")
        del tool["index"]
        reply = {"role": "assistant", "content": said, "tool_calls": [tool]}
        kept = b",".join((prompt, orjson.dumps(output)[1:-1]))
        self._sessions[key] = [*messages, reply], kept
        return response


def _rows(event: bytes) -> list[Any]:
    data = event.removeprefix(b"data: ")
    if not data or data == b"[DONE]":
        return []
    return list(orjson.loads(data)["meta_info"]["output_token_logprobs"])


def _event(call_id: str, delta: dict[str, Any]) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": call_id, "choices": [choice]}) + b"\n\n"


async def serve(make: Callable[[aiohttp.ClientSession], Handler]) -> None:
    """Serve until killed."""
    # Thousands of connections that begin at once may each take long.
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", make(http))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        host, port = runner.addresses[0][:2]
        print(f"http://{host}:{port}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """One of both."""
    kind, engine, *more = sys.argv[1:]
    if kind == "passthrough":
        uvloop.run(serve(lambda http: passthrough(engine, http)))
        return
    policy, journal = map(Path, more)
    tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
    with journal.open("wb", buffering=0) as file:
        uvloop.run(serve(lambda http: Bare(engine, http, tokenizer, file)))


if __name__ == "__main__":
    main()
