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


MakeFolder = Callable[..., Path]

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Makes HF directories of small random models, with norms that are not one: qwen3, untied,
    llama, and moe. Read only."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_model(tmp_path_factory.mktemp("hf") / kind, kind)
        return made[kind]

    return make


def save_model(folder: Path, kind: str) -> Path:
    """Write the HF directory of a model of that kind."""
    import transformers

    names = {"llama": "Llama", "moe": "Qwen3Moe"}
    family = names.get(kind, "Qwen3")
    more: dict[str, object] = {"tie_word_embeddings": kind in ("qwen3", "llama")}
    if kind == "moe":
        more |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**_SIZES, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def hf_folder(model_folder: MakeFolder) -> MakeFolder:
    """The Qwen3 of ``model_folder``, with or without an output layer of its own."""
    return lambda *, tied: model_folder("qwen3" if tied else "untied")


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
