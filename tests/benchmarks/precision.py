"""What bf16 does to the distance between engine and trainer, and what that does to the clip.

    python -m tests.benchmarks.precision [--policy HF_DIR] [--samples 32] [--tokens 48]

A policy is rounded to bf16. The real SGLang serves it on a CPU, computing in fp32 and, started
again, in bf16, and draws samples each time. Megatron then computes their log-probs with the same
weights, in fp32 and in bf16. Every sample is of the version that is trained (staleness 0), so that
an exact trainer would have the ratio 1 and clip nothing. Prints JSON: the gap of log-probs, and the
share of samples that GSPO's published clip takes out when the ratio is to the recorded log-probs
(``behaviour``) or to the trainer's own (``proximal``); and the seconds of each engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch

from cells.ports import free_port
from cells.replica.corpus import Document
from cells.replica.model import start_megatron
from cells.replica.objective import Targets, load_objective
from cells.replica.packing import pack
from cells.replica.place import Place
from cells.replica.policy import Policy
from cells.replica.weights import read_weights
from cells.serving.flags import EngineSettings
from cells.serving.process import EngineProcess
from configs.cells import Device
from configs.layout import LayoutConfig, Precision
from configs.training import ObjectiveConfig, RatioReference
from tasks.training.objectives import objective_path
from tests.conftest import make_tiny_policy

CONTEXT = 512
PROMPT = 24
SEED = 5
START_S = 400


class Samples(NamedTuple):
    """What an engine drew, and the log-probs that it recorded."""

    documents: list[Document]
    recorded: list[torch.Tensor]
    seconds: float


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, help="HF directory; a tiny random one when left out")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="sampled tokens of each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start_megatron()
    with tempfile.TemporaryDirectory(prefix="gyre-precision-") as scratch:
        folder = Path(scratch)
        source = given.policy or make_tiny_policy(folder / "tiny", seed=0)
        rounded = opened(source, Precision.BF16)
        rounded.export(folder / "bf16")
        prompts = drawn(rounded.shape.vocabulary, given.samples)
        found: dict[str, Any] = {}
        for engine in Precision:
            samples = asyncio.run(sampled(folder / "bf16", engine, prompts, given.tokens))
            found[f"sglang {engine} seconds"] = round(samples.seconds, 1)
            for trainer in Precision:
                own = logprobs(opened(folder / "bf16", trainer), samples.documents)
                found[f"sglang {engine}, megatron {trainer}"] = told(samples.recorded, own)
    print(json.dumps(found, indent=2))


def opened(folder: Path, precision: Precision) -> Policy:
    """The policy of an HF directory."""
    policy = Policy.open(folder, Place(LayoutConfig(precision=precision)))
    policy.commit(read_weights(folder, policy.shape), 0)
    return policy


def drawn(vocabulary: int, count: int) -> list[list[int]]:
    """Random prompts."""
    random = np.random.default_rng(SEED)
    return [random.integers(10, vocabulary, PROMPT).tolist() for _ in range(count)]


async def sampled(
    folder: Path, precision: Precision, prompts: list[list[int]], tokens: int
) -> Samples:
    """Samples of a real engine that computes in ``precision``."""
    settings = EngineSettings(
        policy=folder,
        version=0,
        device=Device.CPU,
        context=CONTEXT,
        kv_tokens=16_384,
        requests=64,
        seed=SEED,
        port=free_port(),
        admin_key=secrets.token_urlsafe(16),
        precision=precision,
    )
    engine = EngineProcess(settings, cpus=(), log=folder.parent / f"engine-{precision}.log")
    try:
        await engine.wait_ready(START_S)
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=engine.url, timeout=300, trust_env=False) as http:
            answers = await asyncio.gather(*(_generate(http, p, tokens) for p in prompts))
        seconds = time.monotonic() - began
    finally:
        await engine.close()
    documents, recorded = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = np.array(prompt + [token for _, token, _ in answer], np.int32)
        documents.append((ids, np.arange(len(ids)) >= PROMPT))
        recorded.append(torch.tensor([one for one, _, _ in answer], dtype=torch.float64))
    return Samples(documents, recorded, seconds)


async def _generate(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> list[Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answer = (await http.post("/generate", json=body)).raise_for_status().json()
    found: list[Any] = answer["meta_info"]["output_token_logprobs"]
    return found


def logprobs(policy: Policy, documents: list[Document]) -> list[torch.Tensor]:
    """Megatron's, of the targets of each document."""
    found = policy.passes.logprobs([pack([document]) for document in documents])
    assert found is not None
    return [one.double() for one in found]


def told(engine: list[torch.Tensor], trainer: list[torch.Tensor]) -> dict[str, float]:
    """Gaps in nats, and shares of clipped samples; advantages are 1 and -1 by turns."""
    gap = (torch.cat(engine) - torch.cat(trainer)).abs()
    shares = {}
    for ratio in RatioReference:
        objective = load_objective(objective_path("gspo"), ObjectiveConfig(ratio=ratio))
        clipped = []
        for number, (behaviour, own) in enumerate(zip(engine, trainer, strict=True)):
            advantage = 1.0 if number % 2 else -1.0
            targets = Targets(own, behaviour, advantage, proximal=own)
            clipped.append(objective(targets)[1]["clipped"])
        shares[f"clipped_{ratio.value}"] = sum(clipped) / len(clipped)
    sequence = [float((a - b).mean()) for a, b in zip(trainer, engine, strict=True)]
    return {
        "gap_mean": float(gap.mean()),
        "gap_max": float(gap.max()),
        "sequence_gap_max": max(map(abs, sequence)),
        **shares,
    }


if __name__ == "__main__":
    main()
