"""The gateway on a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cells.gateway.codec import load_codec
from tests.cells.gateway.conftest import Bench, MakeBench, Opened, deltas, prompts
from tests.conftest import EngineAddress

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "def f(x): return x"}]


@pytest.fixture
async def served(
    make_bench: MakeBench, sglang_server: EngineAddress, tiny_policy: Path
) -> AsyncIterator[Bench]:
    codec = load_codec(tiny_policy, "cells.gateway.terse:TerseRenderer")
    async with make_bench(renderer=codec) as bench:
        await put(bench, sglang_server, "serving", 1)
        yield bench


async def put(bench: Bench, engine: EngineAddress, state: str, epoch: int, name: str = "a") -> None:
    body = {"epoch": epoch, "url": engine.url, "token": engine.token, "capacity": 4}
    await bench.admin("PUT", f"/admin/cells/{name}", {**body, "version": 0, "state": state})


def forward_logprobs(policy: Path, ids: list[int], start: int, temperature: float) -> list[float]:
    """Log-probs of ``ids[start:]`` by a HF forward in fp32."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0] / temperature
    rows = torch.log_softmax(logits, -1)
    return [float(rows[at - 1, ids[at]]) for at in range(start, len(ids))]


def assert_logprobs(bench: Bench, policy: Path, temperature: float) -> None:
    calls = bench.calls()
    whole = prompts(calls)
    for call in calls:
        ids = whole[call.call_id] + list(call.output_ids)
        start = len(whole[call.call_id])
        expected = forward_logprobs(policy, ids, start, temperature)
        assert list(call.output_logprobs) == pytest.approx(expected, abs=1e-4)
        assert [(s.version, s.start, s.end) for s in call.spans] == [(0, 0, len(call.output_ids))]


async def continue_twice(execution: Opened, **more: object) -> None:
    messages = list(HELLO)
    for _ in range(3):
        reply = await execution.reply(messages, max_tokens=24, **more)
        messages += [reply, {"role": "user", "content": "more"}]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_recorded_logprobs_are_of_the_sampling_distribution(
    served: Bench, tiny_policy: Path, temperature: float
) -> None:
    await continue_twice(await served.open(temperature=temperature))
    calls = served.calls()
    assert [call.fork_reason for call in calls] == [None] * 3
    assert all(call.parent for call in calls[1:])
    assert all(call.cached_tokens > 0 for call in calls[1:])
    assert_logprobs(served, tiny_policy, temperature)


async def test_the_stop_token_is_recorded_as_sampled(served: Bench, tiny_policy: Path) -> None:
    execution = await served.open()
    stop_ids = set(load_codec(tiny_policy, "cells.gateway.terse:TerseRenderer").stop_ids)
    for _ in range(4):  # a random policy over some 300 tokens ends within 760 at almost every try
        await execution.chat(HELLO, max_tokens=760)
        call = served.calls()[-1]
        if call.finish_reason != "length":
            assert call.output_ids[-1] in stop_ids
            assert not stop_ids & set(call.output_ids[:-1])
            return
    pytest.fail("no call ended by itself")


async def test_a_stream_moves_in_mid_generation(
    served: Bench, sglang_server: EngineAddress, tiny_policy: Path
) -> None:
    """Cells a and b are one server here; what matters is that the abort and the rest are real."""
    execution = await served.open()
    messages = list(HELLO)
    call = asyncio.create_task(execution.chat(messages, max_tokens=700, stream=True))
    await served.until(lambda state: state["cells"]["a"]["in_flight"] == 1)
    await asyncio.sleep(0.15)  # some tokens; right with any number of them
    await put(served, sglang_server, "serving", 2, name="b")
    await put(served, sglang_server, "leaving", 3)
    response = await call
    assert response.status_code == 200
    assert "finish_reason" in deltas(response.text)
    (recorded,) = served.calls()
    assert recorded.finish_reason in ("length", "stop", "tool_calls")
    if recorded.finish_reason == "length":
        assert len(recorded.output_ids) == 700
    assert_logprobs(served, tiny_policy, 1.0)
