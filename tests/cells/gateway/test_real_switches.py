"""Cells that leave and come back under executions on a real SGLang server.

Both cells are one server: what a switch does to a generation, its abort and the rest of it from
prompt and partial answer, is as real as with two.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from cells.gateway.codec import load_codec
from storage.records import Call, CallStatus
from tests.cells.gateway.conftest import Bench, MakeBench, Opened, deltas, prompts
from tests.conftest import EngineAddress

pytestmark = pytest.mark.real

CELLS = ("a", "b")
REPLY_TOKENS = 48


class Executions:
    """Conversations that go on until the switches are over."""

    def __init__(self, bench: Bench, engine: EngineAddress) -> None:
        self.bench = bench
        self.engine = engine
        self.over = asyncio.Event()
        self.errors: list[str] = []

    async def put(self, name: str, state: str) -> None:
        body = {"epoch": 1, "url": self.engine.url, "token": self.engine.token, "capacity": 1000}
        await self.bench.admin(
            "PUT", f"/admin/cells/{name}", {**body, "version": 0, "state": state}
        )

    async def converse(self, opened: Opened, number: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"def f{number}(x)"}]
        turn = 0
        while turn < 2 or not self.over.is_set():
            stream = (turn + number) % 2 == 0
            response = await opened.chat(messages, max_tokens=REPLY_TOKENS, stream=stream)
            if response.status_code != 200 or 'data: {"error"' in response.text:
                self.errors.append(f"{opened.execution_id}: {response.text}")
                self.over.set()
                return
            if stream:
                said = deltas(response.text).get("content")
            else:
                said = response.json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said or "nothing"})
            messages.append({"role": "user", "content": "more"})
            turn += 1
            if turn % 4 == 0:
                messages = messages[:1]  # a fresh history, before the context is full

    async def switch(self, count: int) -> None:
        order = random.Random(2)
        for name in [order.choice(CELLS) for _ in range(count)]:
            if self.over.is_set():
                return
            await self.bench.until(lambda state, name=name: state["cells"][name]["in_flight"] > 0)
            await self.put(name, "leaving")
            await self.put(name, "serving")
        self.over.set()


@pytest.mark.parametrize(
    ("executions", "switches"),
    [
        (6, 12),
        pytest.param(200, 200, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
async def test_every_token_under_forced_switches_is_the_policys(
    make_bench: MakeBench,
    sglang_server: EngineAddress,
    tiny_policy: Path,
    executions: int,
    switches: int,
) -> None:
    codec = load_codec(tiny_policy, "cells.gateway.terse:TerseRenderer")
    async with make_bench(renderer=codec, call_limit_s=250) as bench:
        bench.http.timeout = httpx.Timeout(280)
        running = Executions(bench, sglang_server)
        for name in CELLS:
            await running.put(name, "serving")
        async with asyncio.TaskGroup() as group:
            for number in range(executions):
                opened = await bench.open(f"e{number}")
                group.create_task(running.converse(opened, number))
            group.create_task(running.switch(switches))
        assert running.errors == []
        text = (await bench.http.get(f"{bench.url}/metrics")).text
        aborted = next(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith('gyre_gateway_reroutes_total{end="aborted"}')
        )
        assert aborted >= switches / 2, "generations were taken from their cells"
        for number in range(executions):
            assert_policys(bench.calls(f"e{number}"), tiny_policy)


def assert_policys(calls: list[Call], policy: Path) -> None:
    """Each recorded token has the log-prob that a forward of the whole context gives it."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32)
    whole = prompts(calls)
    for call in calls:
        assert call.status is CallStatus.COMPLETE
        prompt, output = whole[call.call_id], list(call.output_ids)
        assert output and len(output) <= REPLY_TOKENS
        with torch.no_grad():
            rows = model(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
        expected = [float(rows[len(prompt) + at - 1, token]) for at, token in enumerate(output)]
        assert list(call.output_logprobs) == pytest.approx(expected, abs=1e-3)
        assert [(s.version, s.start, s.end) for s in call.spans] == [(0, 0, len(output))]
