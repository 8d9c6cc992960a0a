"""Core attention of a packed row: every token attends to the tokens before it on its own path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cells.replica.cpu_support import megatron_imports
from cells.replica.errors import ReplicaError
from cells.replica.packing import Chains
from cells.replica.place import MASK_ELEMENTS, Place

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ContextShare:
    """The tokens of a row that one context rank holds: two pieces, one from each end, so that all
    ranks attend to as many. Shapes: ``held`` [tokens of the rank], places in the row in order;
    ``inside`` [tokens]: where in ``held`` a token is, for those that are; ``order`` [tokens]:
    brings what was gathered from all ranks into the order of the row.
    """

    held: Tensor
    inside: Tensor
    order: Tensor

    @classmethod
    def of(cls, tokens: int, place: Place) -> ContextShare | None:
        """None where a rank has the whole row. ``tokens`` is a multiple of twice the ranks."""
        ranks = place.layout.context
        if ranks == 1:
            return None
        pieces = torch.arange(tokens).chunk(2 * ranks)
        each = [torch.cat((pieces[i], pieces[2 * ranks - 1 - i])) for i in range(ranks)]
        held = each[place.context]
        inside = torch.zeros(tokens, dtype=torch.long)
        inside[held] = torch.arange(len(held))
        return cls(held, inside, torch.cat(each).argsort())

    def gather(self, local: Tensor) -> Tensor:
        """All ranks' [tokens of the rank, ...] as [tokens, ...], in the order of the row."""
        group = parallel_state.get_context_parallel_group()
        whole = gather_from_sequence_parallel_region(local.contiguous(), group=group)
        return whole.index_select(0, self.order.to(whole.device))


@dataclass
class ChainParams(PackedSeqParams):  # type: ignore[misc]
    """How a row hangs together, carried through Megatron's layers to the attention.

    The format is "sbhd": the rotary embedding is per token already. With "thd" Megatron would split
    queries and keys by document in every layer to restart it.
    """

    qkv_format: str = "sbhd"
    chains: Chains | None = None
    share: ContextShare | None = None

    @cached_property
    def paths(self) -> Paths:
        """Made once for all layers."""
        assert self.chains is not None
        return Paths.of(self.chains)

    @cached_property
    def mask(self) -> Tensor:
        """[tokens of this rank, tokens of the row], where context ranks share a row on a CPU.

        Raises:
            ReplicaError: it would be larger than ``MASK_ELEMENTS``.
        """
        assert self.chains is not None and self.share is not None
        ends, held = self.chains.ends, self.share.held
        if len(held) * len(ends) > MASK_ELEMENTS:
            raise ReplicaError(
                f"a row of {len(ends)} tokens over context ranks needs a dense mask of "
                f"{len(held) * len(ends)} elements on a CPU, at most {MASK_ELEMENTS} are made; "
                f"take a smaller training.micro_step_tokens, or context 1"
            )
        none = torch.zeros((), dtype=torch.long)
        return sees(ends)(none, none, held[:, None], torch.arange(len(ends))[None])

    @cached_property
    def blocks(self) -> BlockMask:
        """The same as a block-sparse mask for a GPU; not run on a GPU.

        Compiled, since the dense mask would be made first otherwise: a terabyte for a million
        tokens.
        """
        assert self.chains is not None
        ends = self.chains.ends.to("cuda")
        held = None if self.share is None else self.share.held.to("cuda")
        queries = len(ends) if held is None else len(held)
        seen = sees(ends, held)
        return create_block_mask(seen, None, None, queries, len(ends), device="cuda", _compile=True)


@dataclass(frozen=True)
class Paths:
    """What each chain attends to: the tokens of its path from the root through its own."""

    lengths: tuple[int, ...]
    """Tokens of each chain."""
    spans: tuple[int, ...]
    """Tokens of each path."""
    gather: Tensor | None
    """Indices of all paths' tokens, one path after the other; None where no path is shared."""
    masks: tuple[Tensor | None, ...]
    """Of each chain [tokens, path], where its queries start inside its path."""

    @classmethod
    def of(cls, chains: Chains) -> Paths:
        bounds = chains.bounds.tolist()
        own = [torch.arange(start, end) for start, end in pairwise(bounds)]
        lengths = tuple(map(len, own))
        paths = [torch.cat(pair) for pair in zip(chains.contexts, own, strict=True)]
        spans = tuple(map(len, paths))
        return cls(
            lengths=lengths,
            spans=spans,
            gather=torch.cat(paths) if chains.shared else None,
            masks=tuple(_mask(*sizes) for sizes in zip(lengths, spans, strict=True)),
        )


def sees(ends: Tensor, held: Tensor | None = None) -> Callable[..., Tensor]:
    """FlexAttention's mask of a row; ``ends`` is that of its chains, ``held`` the places of the
    queries where they are not all of the row's tokens."""

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query if held is None else held[query]
        return (key <= at) & (at < ends[key])

    return mask


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of Megatron's dot-product attention, which refuses packed rows.

    On a CPU, one call of torch's fused attention per chain: no mask of [tokens, tokens], no
    padding. A chain whose own mask would exceed ``MASK_ELEMENTS`` needs none: the queries of its
    whole path are computed again, as if it were not shared.
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
        packed_seq_params: ChainParams | None = None,
    ) -> Tensor:
        """Attention of ``query`` [tokens, 1, heads, head_dim] over ``key`` and ``value``
        [tokens, 1, kv_heads, head_dim]; returns [tokens, 1, heads * head_dim].

        Context ranks gather keys and values of the row, and attend from their own tokens.
        """
        assert packed_seq_params is not None and attention_mask is None
        share = packed_seq_params.share
        if share is not None:
            key, value = share.gather(key), share.gather(value)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if q.is_cuda:
            blocks = packed_seq_params.blocks
            mixed = _compiled_flex()(q, k, v, block_mask=blocks, scale=self.scale, enable_gqa=True)
        elif share is not None:
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=packed_seq_params.mask, scale=self.scale, enable_gqa=True
            )
        else:
            mixed = attend(q, k, v, packed_seq_params.paths, self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def attend(query: Tensor, key: Tensor, value: Tensor, paths: Paths, scale: float | None) -> Tensor:
    """Attention of ``query`` [1, heads, tokens, head_dim] over ``key`` and ``value``
    [1, kv_heads, tokens, head_dim], chain by chain; returns the shape of ``query``."""
    gather = paths.gather
    if gather is not None:
        # One gather for all chains: its gradient is then one addition.
        key, value = key.index_select(2, gather), value.index_select(2, gather)
    # split, not slices: the gradient of all slices together is one concatenation.
    keys, values = key.split(paths.spans, dim=2), value.split(paths.spans, dim=2)
    mixed = []
    begin = 0
    for q, k, v, mask in zip(
        query.split(paths.lengths, dim=2), keys, values, paths.masks, strict=True
    ):
        length, span = q.shape[2], k.shape[2]
        if mask is None and span > length:
            assert gather is not None
            q = query.index_select(2, gather[begin : begin + span])
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        mixed.append(out[:, :, -length:])
        begin += span
    return torch.cat(mixed, dim=2)


def _mask(length: int, span: int) -> Tensor | None:
    """Which of ``span`` tokens the last ``length`` of them see; None where no mask is needed."""
    if length == span or length * span > MASK_ELEMENTS:
        return None
    return torch.ones(length, span, dtype=torch.bool).tril(span - length)


_flex: Callable[..., Any] | None = None


def _compiled_flex() -> Callable[..., Any]:
    """FlexAttention, compiled the first time: only then does it leave out what is masked."""
    global _flex
    if _flex is None:
        _flex = torch.compile(flex_attention)
    return _flex
