"""Control of a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cells.ports import free_port
from cells.serving.engine import (
    EngineClient,
    EngineGoneError,
    EngineLateError,
    EngineRefusedError,
)
from tests.conftest import EngineAddress

pytestmark = pytest.mark.real

PROMPT = list(range(20, 60))
LIMIT_S = 60


@pytest.fixture
async def engine(sglang_server: EngineAddress, tiny_policy: Path) -> AsyncIterator[EngineClient]:
    async with EngineClient(sglang_server.url, sglang_server.token) as client:
        yield client
        if await client.version() != 0:
            await client.update_weights(tiny_policy, 0, LIMIT_S)


async def generate(engine: EngineClient, tokens: int, **more: Any) -> dict[str, Any]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        **more,
    }
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    async with (
        aiohttp.ClientSession(timeout=limit) as http,
        http.post(f"{engine.url}/generate", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.json()


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def test_new_weights_are_served_under_their_version(
    engine: EngineClient, other_policy: Path
) -> None:
    before = await generate(engine, 8)
    await engine.update_weights(other_policy, 7, LIMIT_S)
    after = await generate(engine, 8)
    assert await engine.version() == 7
    assert {span["version"] for span in after["meta_info"]["weight_versions"]} == {"7"}
    assert before["output_ids"] != after["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0, "KV of the old weights was kept"


async def test_logprobs_equal_those_of_the_model(engine: EngineClient, tiny_policy: Path) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    answer = await generate(engine, 8)
    ids = torch.tensor([PROMPT + answer["output_ids"]])
    with torch.no_grad():
        logits = Qwen3ForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)(ids).logits
    expected = logits[0].log_softmax(-1)
    ends = range(len(PROMPT), ids.shape[1])
    assert logprobs(answer) == pytest.approx(
        [float(expected[end - 1, ids[0, end]]) for end in ends], abs=2e-5
    )


async def test_refused_weights_leave_the_old_ones(engine: EngineClient, tmp_path: Path) -> None:
    before = await generate(engine, 8)
    with pytest.raises(EngineRefusedError, match="update_weights_from_disk"):
        await engine.update_weights(tmp_path, 9, LIMIT_S)
    assert await engine.version() == 0
    after = await generate(engine, 8)
    assert after["output_ids"] == before["output_ids"]
    assert logprobs(after) == pytest.approx(logprobs(before), abs=1e-5)


async def test_drain_ends_generations_with_what_they_have(engine: EngineClient) -> None:
    running = [asyncio.create_task(generate(engine, 900)) for _ in range(3)]
    whole = (await generate(engine, 16))["output_ids"]
    await engine.drain(LIMIT_S)
    for answer in await asyncio.gather(*running):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < 900
        shared = min(16, len(answer["output_ids"]))
        assert answer["output_ids"][:shared] == whole[:shared]
    assert len((await generate(engine, 4))["output_ids"]) == 4, "it serves again"


async def test_weights_can_be_replaced_under_load(engine: EngineClient, other_policy: Path) -> None:
    running = asyncio.create_task(generate(engine, 900))
    await generate(engine, 16)
    await engine.update_weights(other_policy, 3, LIMIT_S)
    answer = await running
    spans = answer["meta_info"]["weight_versions"]
    assert {span["version"] for span in spans} == {"0"}, "no token of the new weights"
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_control_needs_the_key(sglang_server: EngineAddress, tiny_policy: Path) -> None:
    async with EngineClient(sglang_server.url, "wrong") as client:
        with pytest.raises(EngineRefusedError, match="401"):
            await client.update_weights(tiny_policy, 1, LIMIT_S)
        assert await client.version() == 0
        with pytest.raises(EngineRefusedError, match="401"):
            await client.wait_ready(LIMIT_S, lambda: "")


async def test_absent_and_silent_servers_are_typed_errors() -> None:
    async with EngineClient(f"http://127.0.0.1:{free_port()}", "key") as client:
        with pytest.raises(EngineGoneError):
            await client.version()
        with pytest.raises(EngineGoneError, match="exit code 3"):
            await client.wait_ready(30, lambda: "exit code 3")
        with pytest.raises(EngineLateError):
            await client.wait_ready(0.3, lambda: "")
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with EngineClient(f"http://127.0.0.1:{port}", "key") as client:
        with pytest.raises(EngineLateError):
            await client.version(limit_s=0.3)
    silent.close()
