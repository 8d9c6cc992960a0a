"""Core attention of a packed row: every document attends to itself only, causally."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cells.replica.cpu_support import megatron_imports

with megatron_imports():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of Megatron's dot-product attention, which refuses packed rows.

    One call of torch's fused attention per document: no mask of [tokens, tokens], no padding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of ``query`` [tokens, 1, heads, head_dim] over ``key`` and ``value``
        [tokens, 1, kv_heads, head_dim]; returns [tokens, 1, heads * head_dim].

        The documents are the intervals of ``packed_seq_params.cu_seqlens_q``.
        """
        assert packed_seq_params is not None and attention_mask is None
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        # split, not slices: the gradient of all slices together is one concatenation.
        queries, keys, values = (
            tensor.permute(1, 2, 0, 3).split(lengths, dim=2) for tensor in (query, key, value)
        )
        mixed = torch.cat(
            [
                F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
                )
                for q, k, v in zip(queries, keys, values, strict=True)
            ],
            dim=2,
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)
