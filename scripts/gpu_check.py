"""What a replica does on a GPU, in a few minutes: prints what it sees, and says so where there is
no GPU.

    python scripts/gpu_check.py

Written for a machine with one GPU or more; **not run on a GPU yet**. Each check prints one line of
JSON and goes on when it fails, so that one run tells as much as it can. Nothing else may use the
GPU. SGLang is not needed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

TOKENS = 3000
SEED = 3


def main() -> int:
    """Entry point; 0 when every check passed, 3 when there is no GPU."""
    if not torch.cuda.is_available():
        say("gpu", found=False, text="there is no GPU: nothing was checked")
        return 3
    name = torch.cuda.get_device_name(0)
    say("gpu", found=True, count=torch.cuda.device_count(), name=name, torch=torch.__version__)
    from cells.replica.model import start_megatron

    start_megatron()
    checks = (attention, transformer_engine, megatron, long_row, memory)
    passed = [_carried_out(check) for check in checks]
    return 0 if all(passed) else 1


def attention() -> dict[str, Any]:
    """FlexAttention of a row with shared prefixes against torch's own attention, chain by chain."""
    from cells.replica.attention import ChainParams, Paths, _compiled_flex, attend
    from cells.replica.packing import pack

    chains = pack(documents(6, TOKENS // 6), share=True).chains
    total = int(chains.bounds[-1])
    generator = torch.Generator().manual_seed(SEED)
    heads = ((8, total), (2, total), (2, total))
    query, key, value = (
        torch.randn(1, count, length, 64, generator=generator) for count, length in heads
    )
    expected = attend(query, key, value, Paths.of(chains), scale=None)
    blocks = ChainParams(chains=chains).blocks
    inputs = [tensor.cuda().requires_grad_() for tensor in (query, key, value)]
    flex = _compiled_flex()
    found = flex(*inputs, block_mask=blocks, enable_gqa=True)
    found.sum().backward()
    seconds = _timed(lambda: flex(*inputs, block_mask=blocks, enable_gqa=True))
    gap = float((found.detach().cpu() - expected).abs().max())
    finite = all(bool(tensor.grad.isfinite().all()) for tensor in inputs if tensor.grad is not None)
    return {"ok": gap < 1e-2 and finite, "tokens": total, "gap_max": gap, "seconds": seconds}


def transformer_engine() -> dict[str, Any]:
    """A policy with ``cells.layout.attention: te`` against one with FlexAttention, in bf16."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from cells.replica.packing import pack
    from cells.replica.place import Place
    from configs.layout import Attention, LayoutConfig, Precision

    if not HAVE_TE:
        return {"ok": True, "text": "Transformer Engine is not installed: not checked"}
    row = pack(documents(3, 200))
    found = []
    for kind in Attention:
        layout = LayoutConfig(precision=Precision.BF16, attention=kind)
        policy = _policy(hidden=256, layers=4, place=Place(layout))
        logprobs = policy.passes.logprobs([row])
        assert logprobs is not None
        policy.passes.backward([row], _sum)
        norm = float(policy.flat.gradients.double().norm())
        found.append((logprobs[0], norm))
    (flex, flex_norm), (engine, norm) = found
    gap = float((flex - engine).abs().max())
    ratio = norm / flex_norm
    return {"ok": gap < 0.1 and abs(ratio - 1) < 0.05, "logprob_gap": gap, "norm_ratio": ratio}


def megatron() -> dict[str, Any]:
    """Log-probs and gradients of the layout's model on the GPU against HF transformers there."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from cells.replica.packing import pack

    policy = _policy(hidden=256, layers=4)
    shape = policy.shape
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )
    from cells.replica.weights import to_hf

    model = Qwen3ForCausalLM(config).cuda().eval()
    weights = to_hf(policy.flat.split(policy.flat.weights), shape)
    model.load_state_dict(weights, strict=False)
    given = documents(3, 200)
    told: dict[str, torch.Tensor] = {}

    def loss(number: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        told["logprobs"] = logprobs.detach()
        return logprobs.sum()

    policy.passes.backward([pack(given)], loss)
    expected = []
    for ids, targets in given:
        row = torch.from_numpy(ids.astype(np.int64)).cuda()
        spread = model(row[None]).logits[0].float().log_softmax(-1)
        at = torch.from_numpy(np.flatnonzero(targets)).cuda()
        expected.append(spread[at - 1, row[at]])
    torch.cat(expected).sum().backward()
    gap = float((told["logprobs"] - torch.cat(expected).detach().cpu()).abs().max())
    gradients = to_hf(policy.flat.split(policy.flat.gradients), shape)
    worst = max(
        float((gradients[name] - parameter.grad).norm() / parameter.grad.norm())
        for name, parameter in model.named_parameters()
        if name in gradients
    )
    return {"ok": gap < 1e-3 and worst < 1e-2, "logprob_gap": gap, "gradient_error": worst}


def long_row() -> dict[str, Any]:
    """Seconds and peak memory of forward and backward of one long row in bf16, recomputed."""
    from cells.replica.packing import pack
    from cells.replica.place import Place
    from configs.layout import LayoutConfig, Precision

    layout = LayoutConfig(precision=Precision.BF16, recompute=True)
    policy = _policy(hidden=1024, layers=8, place=Place(layout))
    found = {}
    for tokens in (8192, 32_768, 131_072):
        torch.cuda.reset_peak_memory_stats()
        row = pack(documents(1, tokens))
        seconds = _timed(partial(policy.passes.backward, [row], _sum))
        found[str(tokens)] = {
            "seconds": seconds,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
    return {"ok": True, "rows": found}


def _sum(_: int, logprobs: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
    return logprobs.sum()


def memory() -> dict[str, Any]:
    """Whether a model's memory goes to main memory and comes back, and how fast."""
    before = torch.cuda.memory_allocated()
    policy = _policy(hidden=2048, layers=12)
    size = policy.flat.weights.nbytes
    host = torch.empty_like(policy.flat.weights, device="cpu", pin_memory=True)
    seconds = _moved(policy.flat.weights, host)
    policy = None
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated() - before
    return {
        "ok": left < size // 100,
        "gb": size / 1e9,
        "to_main_memory_gb_per_s": size / 1e9 / seconds[0],
        "to_gpu_gb_per_s": size / 1e9 / seconds[1],
        "left_gb": left / 1e9,
    }


def _moved(weights: torch.Tensor, host: torch.Tensor) -> tuple[float, float]:
    """Seconds to main memory and back."""
    return _timed(lambda: host.copy_(weights)), _timed(lambda: weights.copy_(host))


def documents(count: int, tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Documents of which each shares half of its ids with the others."""
    random = np.random.default_rng(SEED)
    trunk = random.integers(0, 1000, tokens // 2)
    found = []
    for _ in range(count):
        ids = np.append(trunk, random.integers(0, 1000, tokens - len(trunk))).astype(np.int32)
        found.append((ids, np.arange(tokens) >= len(trunk)))
    return found


def _policy(*, hidden: int, layers: int, place: Any = None) -> Any:
    from cells.replica.model import initialise
    from cells.replica.place import Place
    from cells.replica.planned import planned_shape
    from cells.replica.policy import Policy
    from configs.model import ModelConfig

    shape = replace(
        planned_shape(ModelConfig())[0],
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        kv_heads=hidden // 128,
        head_dim=64,
        ffn=3 * hidden,
        vocabulary=4096,
        context=262_144,
    )
    policy = Policy(shape, {}, place or Place())
    initialise(policy.model, 0.02, SEED)
    return policy


def _timed(work: Callable[[], Any]) -> float:
    work()  # compiles, and takes memory
    torch.cuda.synchronize()
    began = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - began


def _carried_out(check: Callable[[], dict[str, Any]]) -> bool:
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - one run is to tell as much as it can
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    say(check.__name__, **found)
    gc.collect()
    torch.cuda.empty_cache()
    return bool(found["ok"])


def say(what: str, **found: Any) -> None:
    """One line of JSON."""
    print(json.dumps({"check": what, **found}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
