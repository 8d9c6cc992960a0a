"""A real gateway on a free port, scripted engines, and a small tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cells.daemon import Registration
from cells.gateway.codec import Codec
from cells.gateway.recording import ExecutionLog
from cells.gateway.server import Gateway
from cells.process import end_group, spawn
from configs.load import dump_config
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Call
from tests.engines.scripted import Script, ScriptedEngine

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
LIMIT_S = 20.0
START_S = 180.0


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = 'system user assistant {"name": "write", "arguments": {"path": "a.py"}} return x plus'
    inner.train_from_iterator([text] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


@pytest.fixture(scope="session")
def codec(tokenizer: PreTrainedTokenizerFast) -> Codec:
    return Codec(tokenizer, "cells.gateway.terse:TerseRenderer")


@pytest.fixture
def say(tokenizer: PreTrainedTokenizerFast) -> Callable[..., list[int]]:
    """Ids of a reply as a policy would sample them: letter by letter, so that its canonical
    tokenisation differs."""

    special = re.compile("|".join(re.escape(text) for text in SPECIALS) + "|.", re.DOTALL)

    def ids(text: str, *calls: dict[str, Any], end: bool = True) -> list[int]:
        for call in calls:
            text += f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        text += "<|im_end|>" if end else ""
        return [one for part in special.findall(text) for one in tokenizer.encode(part)]

    return ids


@dataclass
class Opened:
    """One execution at a gateway."""

    execution_id: str
    base_url: str
    key: str
    http: httpx.AsyncClient

    async def chat(
        self, messages: list[dict], *, agent: str | None = "main", kind: str = "turn", **more: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        if agent:
            headers |= {"x-agent": agent, "x-agent-call": kind}
        body = {"model": "any", "messages": messages, **more}
        return await self.http.post(
            f"{self.base_url}/chat/completions", json=body, headers=headers, timeout=LIMIT_S
        )

    async def reply(self, messages: list[dict], **more: Any) -> dict[str, Any]:
        response = await self.chat(messages, **more)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]


class Bench:
    """A gateway that runs, and everything to look at it with."""

    def __init__(self, token: str, url: str, store: Store, layout: RunLayout) -> None:
        self.headers = {"authorization": f"Bearer {token}"}
        self.url = url
        self.store = store
        self.layout = layout
        self.http = httpx.AsyncClient(trust_env=False, timeout=LIMIT_S)

    async def stop(self) -> None:
        await self.http.post(f"{self.url}/stop", headers=self.headers)

    async def admin(self, method: str, path: str, body: dict | None = None, **more: Any) -> Any:
        response = await self.http.request(
            method, f"{self.url}{path}", json=body, headers=self.headers, **more
        )
        assert response.status_code == 200, response.text
        return response.json()

    async def open(self, execution_id: str = "e1", version: int = 0, **more: Any) -> Opened:
        body = {"temperature": 1.0, "policy_version": version, **more}
        answer = await self.admin("PUT", f"/admin/executions/{execution_id}", body)
        return Opened(execution_id, answer["base_url"], answer["api_key"], self.http)

    async def cell(
        self,
        name: str,
        engine: ScriptedEngine,
        *,
        state: str = "serving",
        capacity: int = 4,
        epoch: int = 1,
    ) -> dict:
        body = {
            "epoch": epoch,
            "url": engine.url,
            "capacity": capacity,
            "version": engine.version,
            "state": state,
        }
        return await self.admin("PUT", f"/admin/cells/{name}", body)

    async def state(self) -> dict:
        return await self.admin("GET", "/admin/state")

    async def until(self, ready: Callable[[dict], bool], limit_s: float = LIMIT_S) -> dict:
        """Wait for the gateway's state."""
        async with asyncio.timeout(limit_s):
            while not ready(state := await self.state()):  # noqa: ASYNC110  (it is another's)
                await asyncio.sleep(0.01)
        return state

    def calls(self, execution_id: str = "e1") -> list[Call]:
        recorded = ExecutionLog(self.store, self.layout, execution_id).read()
        return sorted((call for call, _ in recorded), key=lambda call: call.index)


def prompts(calls: list[Call]) -> dict[str, list[int]]:
    """Whole prompt ids of recorded calls, put together as their records say."""
    whole: dict[str, list[int]] = {}
    by_id = {call.call_id: call for call in calls}

    def prompt(call: Call) -> list[int]:
        if call.call_id not in whole:
            before: list[int] = []
            if call.parent is not None:
                parent = by_id[call.parent]
                before = (prompt(parent) + list(parent.output_ids))[: call.kept]
            whole[call.call_id] = before + list(call.new_ids)
        return whole[call.call_id]

    for call in calls:
        prompt(call)
    return whole


def deltas(stream: str) -> dict[str, str]:
    """Text of a streamed answer by field, and its ``finish_reason``."""
    texts: dict[str, str] = {}
    for line in stream.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            for field, text in choice["delta"].items():
                if isinstance(text, str):
                    texts[field] = texts.get(field, "") + text
            if choice["finish_reason"]:
                texts["finish_reason"] = choice["finish_reason"]
    return texts


async def registered(store: Store, layout: RunLayout, running: asyncio.Task[None]) -> Registration:
    """Where a gateway that starts now listens, once it does."""
    async with asyncio.timeout(LIMIT_S):
        while not store.exists(layout.host("gateway")):
            assert not running.done(), running.exception()
            await asyncio.sleep(0.01)
    return store.read_record(layout.host("gateway"), Registration)


class GatewayProcess:
    """A gateway as a run starts it, and starts again when it was killed.

    Args:
        folder: for its storage, policy and log.
        context: tokens of the policy's context.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast, context: int) -> None:
        self.store, self.layout = Store(folder / "root"), RunLayout("r1")
        cells = {"cells": [{"name": "a", "core": True}], "lease_s": 600}
        config = RunConfig.model_validate({"model": {"context": context}, "cells": cells})
        self.store.write(self.layout.config, dump_config(config).encode())
        self._folder = folder
        tokenizer.save_pretrained(folder / "policy")
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> Bench:
        self.store.delete(self.layout.host("gateway"))  # as whoever starts daemons does
        argv = [sys.executable, "-m", "cells.gateway.server", "--root", self.store.url]
        argv += ["--run", "r1", "--policy", str(self._folder / "policy")]
        self.process = spawn(argv, env=os.environ, log=self._folder / "gateway.log")
        deadline = time.monotonic() + START_S
        while not self.store.exists(self.layout.host("gateway")):
            assert self.process.poll() is None and time.monotonic() < deadline
            await asyncio.sleep(0.05)
        found = self.store.read_record(self.layout.host("gateway"), Registration)
        return Bench(found.token, found.url, self.store, self.layout)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    def close(self) -> None:
        if self.process is not None:
            end_group(self.process.pid, grace_s=1)


@pytest.fixture
def gateway_process(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[GatewayProcess]:
    made = GatewayProcess(tmp_path, tokenizer, context=2000)
    yield made
    made.close()


MakeBench = Callable[..., Any]


@pytest.fixture
def make_bench(tmp_path: Path, codec: Codec) -> MakeBench:
    """``async with make_bench(**settings) as bench``; settings change the gateway's section,
    ``cells`` and ``model`` those of the cells and the model."""

    @asynccontextmanager
    async def bench(
        *,
        renderer: Codec | None = None,
        cells: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Bench]:
        store, layout = Store(tmp_path / "root"), RunLayout("r1")
        # Nobody renews the lease, and a long test may take long.
        sections = {"gateway": settings, "cells": {"lease_s": 7200, **(cells or {})}}
        sections["model"] = model or {}
        config = RunConfig.model_validate(sections)
        gateway = Gateway(store, layout, config, renderer or codec)
        running = asyncio.create_task(gateway.run())
        found = await registered(store, layout, running)
        made = Bench(found.token, found.url, store, layout)
        try:
            yield made
        finally:
            await made.stop()
            await made.http.aclose()
            await asyncio.wait_for(running, LIMIT_S)

    return bench


@pytest.fixture
async def bench(make_bench: MakeBench) -> AsyncIterator[Bench]:
    async with make_bench() as made:
        yield made


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def engine(script: Script) -> AsyncIterator[ScriptedEngine]:
    made = ScriptedEngine(script)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def other(script: Script) -> AsyncIterator[ScriptedEngine]:
    """A second engine of the same model."""
    made = ScriptedEngine(script)
    await made.start()
    yield made
    await made.stop()
