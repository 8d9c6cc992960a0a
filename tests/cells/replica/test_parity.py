"""Megatron, HF and SGLang compute the same policy from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cells.replica.packing import pack
from cells.replica.shape import read_shape
from cells.replica.weights import read_weights, to_hf
from tests.cells.replica.conftest import VOCABULARY, random_documents
from tests.conftest import EngineAddress

pytestmark = pytest.mark.real
LENGTHS = (33, 2, 70, 9)


def megatron_policy(folder: Path) -> Any:
    from cells.replica.policy import Policy

    policy = Policy.open(folder)
    policy.commit(read_weights(folder, policy.shape), 0)
    return policy


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hf_logprobs(model: Any, documents: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
    """Log-probs of all targets, each document by itself."""
    found = []
    for ids, targets in documents:
        row = torch.from_numpy(ids.astype(np.int64))[None]
        logprobs = torch.log_softmax(model(row).logits[0], dim=-1)
        at = torch.from_numpy(np.flatnonzero(targets))
        found.append(logprobs[at - 1, row[0, at]])
    return torch.cat(found)


@pytest.mark.parametrize("tied", [True, False])
def test_packed_logprobs_and_gradients_equal_hf(
    megatron: None, hf_folder: Callable[..., Path], tied: bool
) -> None:
    from cells.replica.model import target_logprobs

    folder = hf_folder(tied=tied)
    policy, reference = megatron_policy(folder), hf_model(folder)
    documents = random_documents(3, LENGTHS)
    expected = hf_logprobs(reference, documents)
    found = target_logprobs(policy.model, pack(documents))
    assert torch.allclose(found, expected, atol=1e-4, rtol=0)

    factors = torch.randn(len(expected), generator=torch.Generator().manual_seed(1))
    (expected * factors).sum().backward()
    (found * factors).sum().backward()
    gradients = to_hf(policy.flat.split(policy.flat.gradients), policy.shape)
    for name, parameter in reference.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def test_logits_in_parts_change_neither_logprobs_nor_gradients(
    megatron: None, hf_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a row is computed whose logits would take too much memory."""
    from cells.replica import model as replica_model
    from cells.replica.model import target_logprobs

    policy = megatron_policy(hf_folder(tied=True))
    row = pack(random_documents(3, LENGTHS))
    whole = target_logprobs(policy.model, row)
    whole.square().sum().backward()
    expected = policy.flat.gradients.clone()
    policy.flat.zero_gradients()
    monkeypatch.setattr(replica_model, "LOGIT_ELEMENTS", 10 * VOCABULARY)
    parts = target_logprobs(policy.model, row)
    parts.square().sum().backward()
    assert torch.allclose(parts, whole, atol=1e-6)
    assert (policy.flat.gradients - expected).norm() < 1e-6 * expected.norm()


def test_documents_of_a_row_do_not_see_each_other(
    megatron: None, hf_folder: Callable[..., Path]
) -> None:
    from cells.replica.model import target_logprobs

    policy = megatron_policy(hf_folder(tied=True))
    first, second, third = random_documents(5, (20, 31, 8))
    with torch.no_grad():
        alone = target_logprobs(policy.model, pack([second]))
        row = pack([first, second, third])
        start = row.target_counts[0]
        among = target_logprobs(policy.model, row)[start : start + len(alone)]
    assert torch.allclose(alone, among, atol=1e-5, rtol=0)


def test_gradients_add_up_over_rows(megatron: None, hf_folder: Callable[..., Path]) -> None:
    from cells.replica.model import target_logprobs

    policy = megatron_policy(hf_folder(tied=False))
    documents = random_documents(9, (12, 40, 25))
    target_logprobs(policy.model, pack(documents)).sum().backward()
    together = policy.flat.gradients.clone()
    policy.flat.zero_gradients()
    for document in documents:
        target_logprobs(policy.model, pack([document])).sum().backward()
    assert (policy.flat.gradients - together).norm() < 1e-5 * together.norm()


def family(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Documents with shared prefixes: forks inside and at the ends of targets, one document twice,
    one that is a prefix of another, two tokens drawn after the same prefix, and a stranger."""
    [(trunk, marks), (other, apart)] = random_documents(seed, (60, 21))
    random = np.random.default_rng(seed)
    documents = [(trunk, marks), (trunk, marks), (other, apart)]
    for kept in (40, 40, 25, 60, 12):
        ids = np.append(trunk[:kept], random.integers(0, VOCABULARY, 15)).astype(np.int32)
        documents.append((ids, np.append(marks[:kept] & (kept == 25), np.ones(15, np.bool_))))
    documents.append((trunk[:33], np.arange(33) == 32))
    return documents


@pytest.mark.parametrize("mask_elements", [1 << 24, 500])
def test_shared_prefixes_change_neither_logprobs_nor_gradients(
    megatron: None,
    hf_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    mask_elements: int,
) -> None:
    """Chains with a mask, and with so long a path that none is made."""
    from cells.replica import attention
    from cells.replica.model import target_logprobs

    monkeypatch.setattr(attention, "MASK_ELEMENTS", mask_elements)
    policy = megatron_policy(hf_folder(tied=False))
    documents = family(3)
    apart = torch.cat([target_logprobs(policy.model, pack([one])) for one in documents])
    factors = torch.randn(len(apart), generator=torch.Generator().manual_seed(1))
    (apart * factors).sum().backward()
    expected = policy.flat.gradients.clone()
    policy.flat.zero_gradients()
    row = pack(documents, share=True)
    assert len(row.ids) < 0.5 * sum(len(ids) for ids, _ in documents)
    found = target_logprobs(policy.model, row)
    assert torch.allclose(found, apart, atol=1e-5, rtol=0)
    (found * factors).sum().backward()
    assert (policy.flat.gradients - expected).norm() < 1e-5 * expected.norm()
    for name, gradient in policy.flat.split(expected).items():
        error = (policy.flat.named[name].grad - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def test_the_mask_for_a_gpu_gives_the_same_attention(megatron: None) -> None:
    """FlexAttention as a GPU would run it, here by its plain reading on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from cells.replica.attention import Paths, attend, sees

    chains = pack(family(5), share=True).chains
    total = int(chains.bounds[-1])
    generator = torch.Generator().manual_seed(2)
    shapes = ((1, 4, total, 16), (1, 2, total, 16), (1, 2, total, 16))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    blocks = create_block_mask(sees(chains.ends), None, None, total, total, device="cpu")
    expected = flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)
    found = attend(query, key, value, Paths.of(chains), scale=None)
    assert torch.allclose(found, expected, atol=1e-5)


async def test_sglang_and_megatron_and_hf_agree(
    megatron: None, sglang_server: EngineAddress, tiny_policy: Path
) -> None:
    """What the engine records while it samples is what the trainer computes afterwards."""
    import httpx

    from cells.replica.model import target_logprobs

    random = np.random.default_rng(2)
    vocabulary = min(VOCABULARY, read_shape(tiny_policy / "config.json").vocabulary)
    prompts = [random.integers(10, vocabulary, size).tolist() for size in (5, 40, 97)]
    documents, recorded = [], []
    async with httpx.AsyncClient(base_url=sglang_server.url, timeout=120, trust_env=False) as http:
        for prompt in prompts:
            body = {
                "input_ids": prompt,
                "sampling_params": {
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "max_new_tokens": 48,
                    "ignore_eos": True,
                },
                "return_logprob": True,
            }
            answer = (await http.post("/generate", json=body)).raise_for_status().json()
            sampled = answer["meta_info"]["output_token_logprobs"]
            ids = np.array(prompt + [token for _, token, _ in sampled], np.int32)
            targets = np.arange(len(ids)) >= len(prompt)
            documents.append((ids, targets))
            recorded += [logprob for logprob, _, _ in sampled]
    engine = torch.tensor(recorded, dtype=torch.float32)
    assert len(engine) == 3 * 48
    policy = megatron_policy(tiny_policy)
    with torch.no_grad():
        trainer = target_logprobs(policy.model, pack(documents))
        reference = hf_logprobs(hf_model(tiny_policy), documents)
    assert (engine - trainer).abs().max() < 1e-4
    assert (engine - reference).abs().max() < 1e-4
    assert (trainer - reference).abs().max() < 1e-4
