"""KV pages that follow a session from one real server to another, by weight version."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cells.serving.engine import EngineClient
from cells.serving.flags import PAGE, engine_argv, engine_environment
from tests.conftest import TINY_CONTEXT, EngineAddress
from tests.engines.pooled import pooled_settings

LIMIT_S = 120
PROMPT = [20 + 7 * at % 280 for at in range(400)]
WANTED = 256
"""Tokens of the whole answer."""


def test_a_server_without_a_pool_keeps_its_prefixes_to_the_last_token(tmp_path: Path) -> None:
    alone, shared = (
        pooled_settings(tmp_path, TINY_CONTEXT, pool) for pool in (None, "10.0.0.1:7000")
    )
    argv = engine_argv(alone)
    assert argv[argv.index("--page-size") + 1] == "1"
    assert not [word for word in argv if "hicache" in word]
    assert "--enable-hierarchical-cache" in engine_argv(shared)
    assert engine_environment(shared, {})["MOONCAKE_MASTER"] == "10.0.0.1:7000"
    assert engine_environment(shared, {})["MOONCAKE_GLOBAL_SEGMENT_SIZE"] == "0", "not in an engine"
    assert "MOONCAKE_MASTER" not in engine_environment(alone, {})


@pytest.mark.real
@pytest.mark.timeout(600)
async def test_an_aborted_generation_goes_on_elsewhere_with_its_prefix(
    pooled_pair: tuple[EngineAddress, ...],
) -> None:
    first, second = pooled_pair
    async with (
        httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as http,
        EngineClient(first.url, first.token) as control,
    ):
        await generate(http, first, PROMPT[: 3 * PAGE + 1], 1, key="short")
        assert await control.settle(LIMIT_S)
        short = await generate(http, second, PROMPT[: 3 * PAGE + 1], 1, key="short")
        assert short["meta_info"]["cached_tokens"] == 3 * PAGE
        started = asyncio.Event()
        running = asyncio.create_task(stream(http, first, started))
        await asyncio.wait_for(started.wait(), LIMIT_S)
        await control.drain(LIMIT_S)
        rows = await running
        assert await control.settle(LIMIT_S)
        partial = [token for _, token in rows]
        assert 0 < len(partial) < WANTED
        rest = await generate(http, second, [*PROMPT, *partial], WANTED - len(partial))
        cached = rest["meta_info"]["cached_tokens"]
        assert cached > 0.8 * (len(PROMPT) + len(partial))
        whole = await generate(http, first, PROMPT, WANTED, key="another version")
        assert whole["meta_info"]["cached_tokens"] == 0
        found, expected = [*rows, *tokens_of(rest)], tokens_of(whole)
        assert [token for _, token in found] == [token for _, token in expected]
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=1e-4)


async def stream(
    http: httpx.AsyncClient, engine: EngineAddress, started: asyncio.Event
) -> list[tuple[float, int]]:
    """A generation that is cut short; ``started`` is set with its first token."""
    rows: list[tuple[float, int]] = []
    body = {**request(PROMPT, WANTED, "0"), "stream": True}
    async with http.stream("POST", f"{engine.url}/generate", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                rows += tokens_of(json.loads(line.removeprefix("data: ")))
                started.set()
    return rows


async def generate(
    http: httpx.AsyncClient, engine: EngineAddress, ids: list[int], tokens: int, key: str = "0"
) -> dict[str, Any]:
    answer = await http.post(f"{engine.url}/generate", json=request(ids, tokens, key))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def request(ids: list[int], tokens: int, key: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    return {**body, "extra_key": key}


def tokens_of(answer: dict[str, Any]) -> list[tuple[float, int]]:
    return [(row[0], row[1]) for row in answer["meta_info"]["output_token_logprobs"]]
