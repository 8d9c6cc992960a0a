"""Which HF tensors make which Megatron parameter: names, shapes, and how they lie in it.

The one place where names are mapped. It needs no torch, so that a folder can be checked in no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cells.replica.shape import PolicyShape

OUTPUT = "lm_head.weight"


class Fusion(Enum):
    """How the HF tensors of a link lie in the Megatron one."""

    NONE = "none"
    GATE_UP = "gate_up"
    """Two matrices above each other."""
    QKV = "qkv"
    """Per key-value group: its queries, its key, its value."""


@dataclass(frozen=True)
class Link:
    """One Megatron parameter and the HF tensors that it is made of."""

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the HF tensors."""
    fusion: Fusion = Fusion.NONE


def links(shape: PolicyShape) -> list[Link]:
    """Every weight of a model of that shape."""
    wide, query, value = shape.hidden, shape.heads, shape.kv_heads
    vocabulary, norm, head = (shape.vocabulary, wide), (wide,), (shape.head_dim,)
    query_rows, value_rows = query * shape.head_dim, value * shape.head_dim
    found = [
        Link("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocabulary,)),
        Link("decoder.final_layernorm.weight", ("model.norm.weight",), (norm,)),
    ]
    if not shape.tied:
        found.append(Link("output_layer.weight", (OUTPUT,), (vocabulary,)))
    for index in range(shape.layers):
        here, there = f"decoder.layers.{index}.", f"model.layers.{index}."
        plain = {
            ("input_layernorm", "input_layernorm"): norm,
            ("pre_mlp_layernorm", "post_attention_layernorm"): norm,
            ("self_attention.q_layernorm", "self_attn.q_norm"): head,
            ("self_attention.k_layernorm", "self_attn.k_norm"): head,
            ("self_attention.linear_proj", "self_attn.o_proj"): (wide, query_rows),
            ("mlp.linear_fc2", "mlp.down_proj"): (wide, shape.ffn),
        }
        found += [
            Link(f"{here}{megatron}.weight", (f"{there}{hf}.weight",), (size,))
            for (megatron, hf), size in plain.items()
        ]
        found += [
            Link(
                f"{here}self_attention.linear_qkv.weight",
                tuple(f"{there}self_attn.{part}_proj.weight" for part in "qkv"),
                ((query_rows, wide), (value_rows, wide), (value_rows, wide)),
                Fusion.QKV,
            ),
            Link(
                f"{here}mlp.linear_fc1.weight",
                (f"{there}mlp.gate_proj.weight", f"{there}mlp.up_proj.weight"),
                ((shape.ffn, wide), (shape.ffn, wide)),
                Fusion.GATE_UP,
            ),
        ]
    return found


def hf_shapes(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Name to shape of every HF tensor of a model of that shape."""
    return {
        name: size for link in links(shape) for name, size in zip(link.hf, link.shapes, strict=True)
    }
