"""Transformer Engine's place in the model: what it is called with, and who is refused. The engine
itself needs a GPU; here a reference takes its place that reads the same arguments."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cells.replica.errors import ReplicaError
from cells.replica.packing import pack
from cells.replica.place import Place
from cells.replica.policy import Policy
from cells.replica.weights import read_weights
from configs.layout import LayoutConfig
from tests.cells.replica.conftest import MakeFolder, random_documents

pytestmark = pytest.mark.real
LENGTHS = (33, 6, 41)
TE = Place(LayoutConfig(attention="te"))


class Reference(torch.nn.Module):
    """Attention within the documents of a packed row, with the arguments of Megatron-core's
    ``TEDotProductAttention``."""

    def __init__(
        self,
        *,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Any,
        packed_seq_params: Any,
    ) -> torch.Tensor:
        assert attn_mask_type.name == "causal" and packed_seq_params.qkv_format == "thd"
        bounds = packed_seq_params.cu_seqlens_q
        assert bounds.dtype is torch.int32 and torch.equal(bounds, packed_seq_params.cu_seqlens_kv)
        sizes = bounds.diff().tolist()
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == max(sizes)
        parts = []
        for q, k, v in zip(*(one.split(sizes) for one in (query, key, value)), strict=True):
            heads_first = (one.transpose(0, 1)[None] for one in (q, k, v))
            out = F.scaled_dot_product_attention(
                *heads_first, is_causal=True, scale=self.scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)


def logprobs(folder: Path, place: Place) -> torch.Tensor:
    policy = Policy.open(folder, place)
    policy.commit(read_weights(folder, policy.shape), 0)
    found = policy.passes.logprobs([pack(random_documents(3, LENGTHS))])
    assert found is not None
    return found[0]


def test_it_is_given_the_documents_of_a_row(
    megatron: None, model_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cells.replica import te_attention

    folder = model_folder("qwen3")
    with pytest.raises(ReplicaError, match="Transformer Engine is not installed here"):
        Policy.open(folder, TE)
    monkeypatch.setattr(te_attention, "HAVE_TE", True)
    monkeypatch.setattr(te_attention, "TEDotProductAttention", Reference)
    assert torch.allclose(logprobs(folder, TE), logprobs(folder, Place()), atol=1e-5)
    policy = Policy.open(folder, TE)
    [(ids, targets)] = random_documents(3, (20,))
    sisters = [(ids, targets), (np.append(ids[:12], ids[::-1][:8]), targets)]
    with pytest.raises(ReplicaError, match=r"set training\.pack to flat"):
        policy.passes.logprobs([pack(sisters, share=True)])


def test_megatron_has_the_arguments_that_it_is_called_with() -> None:
    """Read from its source: without the engine the class can't be made."""
    source = Path(megatron.core.__path__[0]) / "extensions" / "transformer_engine.py"
    [found] = [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == "TEDotProductAttention"
    ]
    names = {
        node.name: [argument.arg for argument in node.args.args]
        for node in found.body
        if isinstance(node, ast.FunctionDef)
    }
    wanted = set(Reference.__init__.__annotations__) - {"return"}
    assert wanted <= set(names["__init__"])
    assert names["forward"][1:6] == ["query", "key", "value", "attention_mask", "attn_mask_type"]
    assert "packed_seq_params" in names["forward"]
