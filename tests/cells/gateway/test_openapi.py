"""Requests that Schemathesis makes of the gateway's OpenAPI document, fitting and broken ones.

None may be answered with a server error, hang, or leave anything behind.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cells.gateway import openapi
from cells.gateway.server import Gateway
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store
from tests.cells.gateway.conftest import LIMIT_S, Bench, registered
from tests.engines.scripted import Script, ScriptedEngine

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
REOPEN_EVERY = 250
MUTANTS = 16
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 70, 1e308, "", "\0", "\ud800", "x" * 5000, [], {}, [[]], [None]),
    *({"type": "x"}, {"type": ["text"]}, [{"type": "image"}], {"role": {}}, "user", "assistant"),
)
PATHS = ("chat/completions", "responses", "responses/input_tokens", "messages")


class Talkative(Script):
    """Has a reply for every prompt."""

    def __init__(self, replies: list[list[int]]) -> None:
        super().__init__()
        self._replies = replies

    def rest(self, prompt: list[int]) -> list[int]:
        return self._replies[len(prompt) % len(self._replies)]


class Served:
    """A gateway and an engine in a thread of their own."""

    def __init__(self, folder: Path, codec: Any, script: Script) -> None:
        self._folder, self._codec, self._script = folder, codec, script
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.bench: Bench
        self._thread.start()
        self._ready.result(LIMIT_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        store, layout = Store(self._folder / "root"), RunLayout("r1")
        engine = ScriptedEngine(self._script)
        await engine.start()
        config = RunConfig.model_validate({"gateway": {}})
        running = asyncio.create_task(Gateway(store, layout, config, self._codec).run())
        try:
            found = await registered(store, layout, running)
            self.bench = Bench(found.token, found.url, store, layout)
            await self.bench.cell("a", engine, capacity=64)
            self._ready.set_result(None)
            while not self._end.is_set():
                await self.bench.http.post(f"{found.url}/lease", headers=self.bench.headers)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._end.wait(), 5)
        finally:
            await self.bench.stop()
            await self.bench.http.aclose()
            await asyncio.wait_for(running, LIMIT_S)
            await engine.stop()

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    async def _tasks(self) -> int:
        return len(asyncio.all_tasks())

    def tasks(self) -> int:
        return int(self.do(self._tasks()))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(LIMIT_S)


@pytest.fixture
def served(tmp_path, codec, say) -> Iterator[Served]:
    call = {"name": "probe", "arguments": {"a": [1, "x"]}}
    replies = [
        say("plain"),
        say("<think>hm</think>so", call, call),
        say("", end=True),
        say("cut off", end=False),
        say('<tool_call>\n{"name": 1}\n</tool_call>'),
        say("wörld 🎈"),
    ]
    made = Served(tmp_path, codec, Talkative(replies))
    yield made
    made.close()


@dataclass
class Hammer:
    """Sends cases and keeps count of what came back."""

    served: Served
    http: httpx.Client

    def __post_init__(self) -> None:
        self.sent = 0
        self.answers: Counter[str] = Counter()
        self.names: list[str] = []
        self._reopen()

    def _reopen(self) -> None:
        if self.names:
            self.served.do(self.served.bench.admin("DELETE", f"/admin/executions/{self.names[-1]}"))
        self.names.append(f"e{len(self.names)}")
        self.key = self.served.do(self.served.bench.open(self.names[-1])).key

    def send(self, case: Any) -> None:
        """One case, and what can be made of it: streamed, torn, without a right, with a value that
        is something else, and as it would be if the client took one dialect for another."""
        case.path_parameters["execution_id"] = self.names[-1]
        made = case.as_transport_kwargs(base_url=self.served.bench.url)
        answer = self._ask(made, made["url"], _content(made))
        case.validate_response(answer, checks=CHECKS)
        body = _content(made)
        if case.method.upper() != "POST":
            return
        self._ask(made, made["url"], body[: len(body) // 2])
        for key in ({}, {"authorization": f"Bearer {self.key}x"}):
            assert self._ask(made, made["url"], body, key).status_code == 401
        if isinstance(case.body, dict):
            turned = {**case.body, "stream": case.body.get("stream") is not True}
            for body_ in (turned, *mutants(case.body)):
                text = json.dumps(body_).encode("utf-8", "surrogatepass")
                self._ask(made, made["url"], text)
        for path in PATHS:
            url = f"{self.served.bench.url}/e/{self.names[-1]}/v1/{path}"
            if url != made["url"]:
                self._ask(made, url, body)

    def _ask(
        self, made: dict[str, Any], url: str, body: bytes, key: dict[str, str] | None = None
    ) -> httpx.Response:
        if self.sent and self.sent % REOPEN_EVERY == 0:
            self._reopen()
        self.sent += 1
        url = re.sub("/e/[^/]*/", f"/e/{self.names[-1]}/", url)
        key = {"x-api-key": self.key} if key is None else key
        headers = {name: value for name, value in made["headers"].items() if _sendable(name, value)}
        answer = self.http.request(
            made["method"], url, params=made.get("params"), headers=headers | key, content=body
        )
        self.answers[f"{url.split('/v1/')[1].split('/')[0]} {answer.status_code}"] += 1
        assert answer.status_code < 500, answer.text
        if answer.headers["content-type"].startswith("text/event-stream"):
            _read_events(answer.text)
        else:
            kind = answer.headers["content-type"]
            assert kind == "application/json", (answer.request, answer.request.headers, answer.text)
            assert isinstance(answer.json(), dict)
        return answer


def mutants(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Bodies with one value, anywhere, exchanged for an odd one."""
    rng = random.Random(repr(body))  # the same body has the same mutants
    for _ in range(MUTANTS):
        made = copy.deepcopy(body)
        place: Any = made
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
                place = inner
                continue
            place[key] = rng.choice(ODD)
            break
        yield made


def _sendable(name: str, value: str) -> bool:
    """Whether a client can send a header that was generated, and it is not for ``send`` to say."""
    ours = name.lower() in ("authorization", "x-api-key", "content-length", "host")
    return not ours and f"{name}{value}".isprintable() and value == value.strip()


def _content(made: dict[str, Any]) -> bytes:
    body = made.get("data") or b""
    if "json" in made:
        body = json.dumps(made["json"]).encode("utf-8", "surrogatepass")
    if isinstance(body, str):
        body = body.encode("utf-8", "surrogatepass")
    return body if isinstance(body, bytes) else b""


def _read_events(text: str) -> None:
    """Every event is JSON, and the stream ends as its dialect says."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    last = lines[-1]
    for line in lines:
        assert line == "[DONE]" or isinstance(json.loads(line), dict)
    ends = ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")
    assert last == "[DONE]" or json.loads(last).get("type") in ends or "error" in json.loads(last)


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def hammer(served: Served, cases: int) -> Hammer:
    document = httpx.get(f"{served.bench.url}/openapi.json", trust_env=False).json()
    schema = schemathesis.openapi.from_dict(document)
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    strategies = [
        found.ok().as_strategy(generation_mode=mode)
        for found in schema.get_all_operations()
        for mode in modes
        if found.ok().body or mode is schemathesis.GenerationMode.POSITIVE
    ]
    served.do(served.bench.open("warm"))
    before = served.tasks()
    files = _open_files()
    with httpx.Client(trust_env=False, timeout=LIMIT_S) as http:
        made = Hammer(served, http)

        @settings(
            max_examples=cases,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=st.one_of(strategies))
        def run(case: Any) -> None:
            made.send(case)

        run()
    state = served.do(served.bench.state())
    assert state["cells"]["a"]["in_flight"] == 0 and state["waiting"] == 0
    seen = served.do(served.bench.admin("GET", f"/admin/executions/{made.names[-1]}"))
    assert seen["in_flight"] == 0
    assert served.tasks() <= before + 4  # connections that are kept alive
    assert _open_files() <= files + 16
    print(json.dumps({"requests": made.sent, "answers": dict(sorted(made.answers.items()))}))
    return made


def test_generated_requests(served) -> None:
    made = hammer(served, 20)
    assert sum(n for answer, n in made.answers.items() if answer.endswith(" 200")) > 0
    assert sum(n for answer, n in made.answers.items() if answer.endswith(" 400")) > 0


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_generated_requests(served) -> None:
    assert hammer(served, 545).sent >= 10_000


async def test_the_document_has_every_public_route(bench) -> None:
    served = (await bench.http.get(f"{bench.url}/openapi.json")).json()
    assert served == openapi.document()
    execution = await bench.open()
    for path, operations in served["paths"].items():
        url = path.replace("{execution_id}", execution.execution_id).replace("{model}", "m/n")
        for method in operations.keys() - {"parameters"}:
            answer = await bench.http.request(method, f"{bench.url}{url}")
            assert answer.status_code == 401, url
            other = await bench.http.request("PATCH", f"{bench.url}{url}")
            assert other.status_code == 405


async def test_odd_paths_are_answered_in_a_dialect(bench) -> None:
    execution = await bench.open()
    headers = {"x-api-key": execution.key}
    model = await bench.http.get(f"{execution.base_url}/models/a%0Ab", headers=headers)
    assert model.json()["id"] == "a\nb"
    for path in ("/nothing", "/a%0Ab", "//"):
        answer = await bench.http.get(f"{execution.base_url}{path}", headers=headers)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
