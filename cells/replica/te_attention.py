"""Core attention by Transformer Engine, on GPUs that have it. Not run on a GPU.

Written against Megatron-core 0.16's ``TEDotProductAttention``: in its packed form ("thd") it takes
queries, keys and values [tokens, heads, head_dim] with the bounds of the documents, and picks the
kernel itself (cuDNN or FlashAttention, in bf16 only). It knows documents, not trees of shared
prefixes, and shares a row out over context ranks in another order than we do: both are refused
before anything starts (``check_model``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cells.replica.attention import ChainParams
from cells.replica.cpu_support import megatron_imports
from cells.replica.errors import ReplicaError

with megatron_imports():
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule


class TransformerEngineAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of ``PackedAttention``, for rows of whole documents.

    Raises:
        ReplicaError: Transformer Engine is not installed.
    """

    def __init__(self, config: Any, layer_number: int, **options: Any) -> None:
        super().__init__(config=config)
        if not HAVE_TE:
            raise ReplicaError(
                "cells.layout.attention is te, and Transformer Engine is not installed here: "
                "pip install 'transformer-engine[pytorch]', or set it to auto"
            )
        self.inner = TEDotProductAttention(config=config, layer_number=layer_number, **options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: ChainParams | None = None,
    ) -> Tensor:
        """As ``PackedAttention``: [tokens, 1, heads, head_dim] to [tokens, 1, heads * head_dim]."""
        assert packed_seq_params is not None and attention_mask is None
        mixed = self.inner(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            None,
            attn_mask_type=AttnMaskType.causal,
            packed_seq_params=documents(packed_seq_params, query),
        )
        return mixed.reshape(len(query), 1, -1)


def documents(params: ChainParams, like: Tensor) -> PackedSeqParams:
    """The bounds of a row's documents, on the device of ``like``.

    Raises:
        ReplicaError: documents share prefixes, or context ranks the row.
    """
    chains = params.chains
    assert chains is not None
    if chains.shared or params.share is not None:
        raise ReplicaError(
            "Transformer Engine attends within whole documents: set training.pack to flat, and "
            "cells.layout.context to 1, or cells.layout.attention to auto"
        )
    bounds = chains.bounds.int()
    longest = int(bounds.diff().max())
    bounds = bounds.to(like.device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
