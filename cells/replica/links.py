"""Which HF tensors make which Megatron parameter: names, shapes, and how they lie in it.

The one place where names are mapped, for whole models and for the part that one rank holds. It
needs no torch, so that a folder can be checked in no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from cells.replica.place import Place
from cells.replica.shape import PolicyShape

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


class Fusion(Enum):
    """How the HF tensors of a link lie in the Megatron one."""

    NONE = "none"
    GATE_UP = "gate_up"
    """Two matrices above each other."""
    QKV = "qkv"
    """Per key-value group: its queries, its key, its value."""


class Cut(Enum):
    """How tensor ranks share the HF tensors of a link."""

    NONE = "none"
    """Each has them whole."""
    ROWS = "rows"
    COLUMNS = "columns"
    WORDS = "words"
    """Rows of a vocabulary, whose size need not be a multiple of the ranks."""


@dataclass(frozen=True)
class Piece:
    """A part of an HF tensor: from ``start`` to before ``stop`` of dimension ``dim``."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    start: int
    stop: int

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the part."""
        sizes = list(self.shape)
        sizes[self.dim] = self.stop - self.start
        return tuple(sizes)


@dataclass(frozen=True)
class Link:
    """One Megatron parameter and the HF tensors that it is made of."""

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the HF tensors."""
    fusion: Fusion = Fusion.NONE
    cut: Cut = Cut.NONE
    expert: bool = False
    """Part of one expert, which expert ranks hold whole."""
    copy: bool = False
    """The same HF tensor is in another stage too, which writes it."""

    def pieces(self, shape: PolicyShape, place: Place) -> list[Piece]:
        """What a rank holds of each HF tensor, in order."""
        found = []
        for name, whole in zip(self.hf, self.shapes, strict=True):
            dim = 1 if self.cut is Cut.COLUMNS else 0
            if self.cut is Cut.NONE:
                start, stop = 0, whole[dim]
            elif self.cut is Cut.WORDS:
                words = place.words(shape)
                start, stop = words.start, words.stop
            else:
                each = whole[dim] // place.layout.tensor
                start, stop = place.tensor * each, (place.tensor + 1) * each
            found.append(Piece(name, whole, dim, start, stop))
        return found


def links(shape: PolicyShape, place: Place | None = None) -> list[Link]:
    """Every weight that a rank holds; without ``place``, of the whole model.

    Megatron numbers layers and experts from 0 in each rank.
    """
    place = place or Place()
    wide = shape.hidden
    vocabulary = (shape.vocabulary, wide)
    found = []
    if place.first_stage:
        name = "embedding.word_embeddings.weight"
        found.append(Link(name, (EMBEDDING,), (vocabulary,), cut=Cut.WORDS))
    if place.last_stage:
        found.append(Link("decoder.final_layernorm.weight", ("model.norm.weight",), ((wide,),)))
        if not shape.tied or not place.first_stage:
            of, copy = (EMBEDDING, True) if shape.tied else (OUTPUT, False)
            found.append(
                Link("output_layer.weight", (of,), (vocabulary,), cut=Cut.WORDS, copy=copy)
            )
    for index, layer in enumerate(place.layers(shape)):
        here, there = f"decoder.layers.{index}.", f"model.layers.{layer}."
        found += _attention(shape, here, there)
        if shape.experts is None:
            found += _mlp(f"{here}mlp.", f"{there}mlp.", wide, shape.ffn, expert=False)
            continue
        router = (shape.experts.count, wide)
        found.append(Link(f"{here}mlp.router.weight", (f"{there}mlp.gate.weight",), (router,)))
        for number, expert in enumerate(place.experts(shape)):
            megatron = f"{here}mlp.experts.local_experts.{number}."
            hf = f"{there}mlp.experts.{expert}."
            found += _mlp(megatron, hf, wide, shape.experts.ffn, expert=True)
    return found


def _attention(shape: PolicyShape, here: str, there: str) -> Iterator[Link]:
    """Attention and norms of a layer."""
    wide, head = shape.hidden, (shape.head_dim,)
    query_rows, value_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    plain = {
        ("input_layernorm", "input_layernorm"): (wide,),
        ("pre_mlp_layernorm", "post_attention_layernorm"): (wide,),
    }
    if shape.qk_norm:
        plain[("self_attention.q_layernorm", "self_attn.q_norm")] = head
        plain[("self_attention.k_layernorm", "self_attn.k_norm")] = head
    for (megatron, hf), size in plain.items():
        yield Link(f"{here}{megatron}.weight", (f"{there}{hf}.weight",), (size,))
    yield Link(
        f"{here}self_attention.linear_proj.weight",
        (f"{there}self_attn.o_proj.weight",),
        ((wide, query_rows),),
        cut=Cut.COLUMNS,
    )
    yield Link(
        f"{here}self_attention.linear_qkv.weight",
        tuple(f"{there}self_attn.{part}_proj.weight" for part in "qkv"),
        ((query_rows, wide), (value_rows, wide), (value_rows, wide)),
        Fusion.QKV,
        Cut.ROWS,
    )


def _mlp(here: str, there: str, wide: int, ffn: int, *, expert: bool) -> Iterator[Link]:
    """A gated MLP: that of a layer, or one expert."""
    yield Link(
        f"{here}linear_fc2.weight",
        (f"{there}down_proj.weight",),
        ((wide, ffn),),
        cut=Cut.NONE if expert else Cut.COLUMNS,
        expert=expert,
    )
    yield Link(
        f"{here}linear_fc1.weight",
        (f"{there}gate_proj.weight", f"{there}up_proj.weight"),
        ((ffn, wide), (ffn, wide)),
        Fusion.GATE_UP,
        Cut.NONE if expert else Cut.ROWS,
        expert,
    )


def hf_shapes(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Name to shape of every HF tensor of a model of that shape."""
    return {
        name: size for link in links(shape) for name, size in zip(link.hf, link.shapes, strict=True)
    }
