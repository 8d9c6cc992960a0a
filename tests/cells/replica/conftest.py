"""Policies, sealed groups and one Megatron for the tests of the replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.objects import Store
from storage.records import CallKind, GroupHeader
from storage.samples import Sample, SealedGroup, seal

VOCABULARY = 96


@pytest.fixture(scope="session")
def megatron() -> None:
    """Megatron in this process, a world of one."""
    from cells.replica.model import start_megatron

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        start_megatron()


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes HF directories of small random Qwen3 models, with norms that are not one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    made: dict[bool, Path] = {}

    def make(*, tied: bool) -> Path:
        if tied not in made:
            torch.manual_seed(7)
            config = Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=48,
                intermediate_size=80,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=256,
                tie_word_embeddings=tied,
                initializer_range=0.15,
                rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
                dtype="float32",
            )
            model = Qwen3ForCausalLM(config).float()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(0.2 * torch.randn_like(parameter))
            made[tied] = tmp_path_factory.mktemp("hf") / f"tied-{tied}"
            model.save_pretrained(made[tied])
            (made[tied] / "tokenizer.json").write_text("{}")
        return made[tied]

    return make


def random_documents(seed: int, lengths: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Documents of random ids; about half of the tokens are targets, the last one always."""
    random = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        targets = random.random(length) < 0.5
        targets[0], targets[-1] = False, True
        documents.append((random.integers(0, VOCABULARY, length).astype(np.int32), targets))
    return documents


def seal_group(store: Store, key: str, seed: int, lengths: tuple[int, ...] = (30, 12, 45)) -> None:
    """A sealed group of random samples that version 0 made, with plausible log-probs."""
    random = np.random.default_rng(seed)
    samples = []
    for index, (ids, targets) in enumerate(random_documents(seed, lengths)):
        logprobs = np.where(targets, random.normal(-4.5, 0.5, len(ids)), 0).astype(np.float32)
        samples.append(
            Sample(
                execution_id=f"{key}-e{index}",
                kind=CallKind.MAIN,
                ids=ids,
                targets=targets,
                logprobs=logprobs,
                versions=np.where(targets, 0, -1).astype(np.int32),
                advantage=float(random.normal()),
                weight=1.0,
            )
        )
    header = GroupHeader(
        query_id=key, step=0, problem_id="p", sealed_at=0.0, members=(), spread=True
    )
    seal(store, key, SealedGroup(header, tuple(samples)))
