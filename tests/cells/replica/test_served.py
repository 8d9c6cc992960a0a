"""A real SGLang server gives the same log-probs to what a replica exports, experts too."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from cells.ports import free_port
from cells.replica.packing import pack
from cells.replica.policy import Policy
from cells.replica.weights import read_weights
from cells.serving.flags import EngineSettings
from cells.serving.process import EngineProcess
from configs.cells import Device
from tests.cells.replica.conftest import VOCABULARY, MakeFolder

CONTEXT = 200
SAMPLED = 24
START_S = 300


@pytest.mark.real
@pytest.mark.timeout(400)
async def test_exported_experts_are_served_with_equal_logprobs(
    megatron: None, model_folder: MakeFolder, tmp_path: Path
) -> None:
    """SGLang takes its way for CPUs without AMX: one matrix product for each expert."""
    policy = Policy.open(model_folder("moe"))
    policy.commit(read_weights(model_folder("moe"), policy.shape), 1)
    with torch.no_grad():  # not what the folder holds
        for parameter in policy.flat.named.values():
            parameter.mul_(1.1)
    exported = tmp_path / "exported"
    policy.export(exported)
    save_tokenizer(exported)
    settings = EngineSettings(
        policy=exported,
        version=1,
        device=Device.CPU,
        context=CONTEXT,
        kv_tokens=2048,
        requests=4,
        seed=1,
        port=free_port(),
        admin_key=secrets.token_urlsafe(16),
    )
    engine = EngineProcess(settings, cpus=(), log=tmp_path / "engine.log")
    try:
        await engine.wait_ready(START_S)
        prompts = [list(range(5, 25)), list(range(60, 20, -2))]
        answers = [await _sampled(engine.url, prompt) for prompt in prompts]
    finally:
        await engine.close()
    documents = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = np.array(prompt + [token for _, token in answer], np.int32)
        documents.append((ids, np.arange(len(ids)) >= len(prompt)))
    found = policy.passes.logprobs([pack(documents)])
    assert found is not None
    recorded = torch.tensor([one for answer in answers for one, _ in answer])
    assert len(recorded) == len(prompts) * SAMPLED
    assert float((found[0] - recorded).abs().max()) < 1e-4
    assert max(token for answer in answers for _, token in answer) < VOCABULARY


def save_tokenizer(folder: Path) -> None:
    """A word for each id, for a server that wants to show text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", unk_token="w0")
    fast.save_pretrained(folder)


async def _sampled(url: str, prompt: list[int]) -> list[tuple[float, int]]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": SAMPLED, "ignore_eos": True},
        "return_logprob": True,
    }
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        answer: Any = (await http.post("/generate", json=body)).raise_for_status().json()
    return [(one, token) for one, token, _ in answer["meta_info"]["output_token_logprobs"]]
