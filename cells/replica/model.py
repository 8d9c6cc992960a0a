"""A Qwen3 policy as a Megatron ``GPTModel``, run on packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cells.replica.cpu_support import megatron_imports
from cells.replica.packing import PackedRow
from cells.replica.shape import PolicyShape

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cells.replica.attention import ChainParams, PackedAttention

_ENTROPY_ROWS = 256


def start_megatron(
    *, rank: int = 0, world: int = 1, rendezvous: Path | None = None, limit_s: float = 120
) -> None:
    """Make this process rank ``rank`` of ``world`` data-parallel ones. Call once.

    Args:
        rendezvous: a file that all ranks share; a process alone needs none (and no port).
        limit_s: longest wait for another rank, in a collective too.
    """
    if world == 1:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.FileStore(str(rendezvous), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit_s)
    )
    with _one_group() if world == 1 else nullcontext():
        parallel_state.initialize_model_parallel(1, 1)


@contextmanager
def _one_group() -> Iterator[None]:
    """In a world of one, every group that Megatron asks for is that world.

    It asks for about sixty, and gloo gives each a thread that polls: a replica that sleeps would
    use 3 % of a core.
    """
    new_group = dist.new_group
    dist.new_group = lambda *ranks, **options: dist.group.WORLD
    try:
        yield
    finally:
        dist.new_group = new_group


def make_model(shape: PolicyShape) -> GPTModel:
    """An untrained model of that shape in float32; its weights are not meaningful yet.

    It lies on the GPU where there is one (not run on a GPU), and in main memory otherwise.
    """
    with megatron_imports():  # quiet: it warns of kernels that are not asked for
        config = TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            kv_channels=shape.head_dim,
            ffn_hidden_size=shape.ffn,
            normalization="RMSNorm",
            layernorm_epsilon=shape.norm_epsilon,
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            # Weights are drawn or loaded in main memory in any case: no random state of a GPU.
            use_cpu_initialization=True,
            # Every fusion below is a CUDA kernel.
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
        )
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        model = GPTModel(
            config,
            spec,
            vocab_size=shape.vocabulary,
            max_sequence_length=shape.context,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            share_embeddings_and_output_weights=shape.tied,
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def initialise(model: GPTModel, std: float, seed: int) -> None:
    """Matrices from a normal distribution, norms to one; the same seed, the same weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                drawn = torch.randn(parameter.shape, generator=generator) * std
                parameter.copy_(drawn)


def next_logits(model: GPTModel, row: PackedRow, places: Tensor) -> Tensor:
    """Logits [places, vocabulary] of what follows the row's tokens at ``places``.

    The parts of the model are called one by one, for two reasons: the rotary embedding then
    follows ``row.positions`` (Megatron's own forward numbers the whole row), and the output layer,
    the largest matrix of a small model, sees only the rows that are wanted.
    """
    longest = int(row.positions.max()) + 1
    device = next(model.parameters()).device
    angles = model.rotary_pos_emb.get_freqs_non_repeated(longest)[row.positions].to(device)
    rotary = torch.cat((angles, angles), dim=-1)[:, None, None, :]  # [tokens, 1, 1, head_dim]
    ids = row.ids[None].to(device)
    hidden = model.decoder(
        hidden_states=model.embedding(input_ids=ids, position_ids=None),
        attention_mask=None,
        rotary_pos_emb=rotary,
        packed_seq_params=ChainParams(chains=row.chains),
    )
    weight = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else None
    )
    logits, _ = model.output_layer(hidden[places.to(device)], weight=weight)
    return logits[:, 0]


def target_logprobs(model: GPTModel, row: PackedRow) -> Tensor:
    """Natural log-probabilities [targets] of the row's targets at temperature 1, float32.

    They lie in main memory, where objectives are computed. Where several targets follow one token,
    the distribution that they were drawn from is computed once.
    """
    logprobs, choice = _distributions(model, row)
    return _chosen(logprobs, choice, row)


def target_logprobs_and_entropies(model: GPTModel, row: PackedRow) -> tuple[Tensor, Tensor]:
    """``target_logprobs``, and the entropies [targets] in nats, without gradient, of the
    distributions that the targets were drawn from."""
    logprobs, choice = _distributions(model, row)
    # In parts: another matrix as large as the logits might not fit beside them.
    parts = logprobs.detach().split(_ENTROPY_ROWS)
    entropies = torch.cat([-(part.exp() * part).nansum(dim=-1) for part in parts])
    return _chosen(logprobs, choice, row), entropies[choice.to(entropies.device)].cpu()


def _distributions(model: GPTModel, row: PackedRow) -> tuple[Tensor, Tensor]:
    """Log-probabilities [places, vocabulary] after each distinct token before a target, and the
    place [targets] of each target."""
    places, choice = torch.unique(row.before, return_inverse=True)
    return next_logits(model, row, places).float().log_softmax(dim=-1), choice


def _chosen(logprobs: Tensor, choice: Tensor, row: PackedRow) -> Tensor:
    return logprobs[choice.to(logprobs.device), row.labels.to(logprobs.device)].cpu()
