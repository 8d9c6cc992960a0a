"""A policy as a Megatron ``GPTModel``, or a rank's part of one, run on packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cells.replica.cpu_support import install_in_megatron, megatron_imports
from cells.replica.errors import ReplicaError
from cells.replica.packing import PackedRow
from cells.replica.place import LOGIT_ELEMENTS, Place
from cells.replica.shape import PolicyShape
from configs.layout import Attention, Precision

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cells.replica.attention import ChainParams, ContextShare, PackedAttention

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}
_ENTROPY_ROWS = 256


def start_megatron(
    place: Place | None = None,
    *,
    rendezvous: Path | dist.Store | None = None,
    nodes: int = 1,
    limit_s: float = 120,
) -> None:
    """Make this process one rank of a replica. Call once.

    Args:
        rendezvous: a file that all ranks share, or a store; a process alone needs none (and no
            port).
        nodes: machines that the ranks are on, as many on each.
        limit_s: longest wait for another rank, in a collective too.
    """
    place = place or Place()
    layout = place.layout
    cuda = torch.cuda.is_available()
    if place.alone:
        rendezvous = dist.HashStore()
    elif isinstance(rendezvous, Path):
        rendezvous = dist.FileStore(str(rendezvous), layout.ranks)
    if cuda:
        here = layout.ranks // nodes
        if here > torch.cuda.device_count():
            raise ReplicaError(
                f"{here} of the {layout.ranks} ranks of cells.layout are on this machine, which "
                f"has {torch.cuda.device_count()} GPUs: give the cell more machines"
            )
        torch.cuda.set_device(place.rank % here)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=rendezvous,
        rank=place.rank,
        world_size=layout.ranks,
        timeout=timedelta(seconds=limit_s),
    )
    with _one_of_each(timedelta(seconds=limit_s)):
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1,
        )
    install_in_megatron()
    if cuda:
        model_parallel_cuda_manual_seed(0)


@contextmanager
def _one_of_each(limit: timedelta) -> Iterator[None]:
    """Groups of the same ranks are one group.

    Megatron asks for about sixty, and gloo gives each a thread that polls: a replica that sleeps
    would use 3 % of a core. Every rank asks for all of them, in the same order.
    """
    new_group = dist.new_group
    everyone = tuple(range(dist.get_world_size()))
    made: dict[tuple[int, ...], Any] = {everyone: dist.group.WORLD}

    def once(ranks: Sequence[int] | None = None, *_: Any, **options: Any) -> Any:
        key = everyone if ranks is None else tuple(ranks)
        if key not in made:
            made[key] = new_group(list(key), timeout=limit)
        return made[key]

    dist.new_group = once
    try:
        yield
    finally:
        dist.new_group = new_group


def make_model(shape: PolicyShape, place: Place | None = None) -> GPTModel:
    """An untrained model of that shape, or a rank's part of it; its weights have no meaning yet.

    It lies on the GPU where there is one (not run on a GPU), and in main memory otherwise.
    """
    place = place or Place()
    layout = place.layout
    dtype = DTYPES[layout.precision]
    cuda = torch.cuda.is_available()
    more: dict[str, Any] = {}
    if layout.recompute:
        more |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    experts = shape.experts
    if experts is not None:
        more |= {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.ffn,
            # Softmax over the chosen experts alone is that over all of them, normalised.
            "moe_router_pre_softmax": not experts.normalised,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            # The other one needs CUDA streams.
            "moe_token_dispatcher_type": "alltoall" if cuda else "allgather",
        }
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
            qk_layernorm=shape.qk_norm,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1,
            sequence_parallel=layout.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            # Sums are divided by executions at the end of an update, not by rows.
            calculate_per_token_loss=True,
            batch_p2p_sync=cuda,
            deallocate_pipeline_outputs=True,
            # Weights are drawn or loaded in main memory in any case: no random state of a GPU.
            use_cpu_initialization=True,
            perform_initialization=False,
            # Every fusion below is a CUDA kernel.
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            **more,
        )
        model = GPTModel(
            config,
            _block(shape, place),
            vocab_size=place.padded_vocabulary(shape),
            max_sequence_length=shape.context,
            pre_process=place.first_stage,
            post_process=place.last_stage,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            share_embeddings_and_output_weights=shape.tied,
        )
    model.shape = shape
    if layout.sequence_parallel and place.last_stage:
        # It gets the tokens whose successor is wanted, gathered already.
        model.output_layer.sequence_parallel = False
        model.output_layer.allreduce_dgrad = True
    return model.to("cuda" if cuda else "cpu")


class Norm(torch.nn.RMSNorm):  # type: ignore[misc]
    """RMS norm of the last dimension, float32 inside. Megatron's own refuses sequence parallelism,
    whose partial gradients we add up ourselves."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


def _block(shape: PolicyShape, place: Place) -> TransformerBlockSubmodules:
    """The layers of a stage, with our norms and core attention."""
    layer = get_gpt_layer_local_spec(
        num_experts=None if shape.experts is None else shape.experts.count,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention.core_attention = _core_attention(place.layout.attention)
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules([layer] * len(place.layers(shape)), layer_norm=Norm)


def _core_attention(kind: Attention) -> type:
    if kind is Attention.AUTO:
        return PackedAttention
    # Not at the top: where it is installed, its import takes seconds.
    from cells.replica.te_attention import TransformerEngineAttention

    return TransformerEngineAttention


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


def run_stage(model: GPTModel, row: PackedRow, place: Place) -> tuple[Tensor, ContextShare | None]:
    """Hidden states [tokens of this rank, 1, hidden] of a row after this rank's layers.

    The parts of the model are called one by one, since the rotary embedding then follows
    ``row.positions`` (Megatron's own forward numbers the whole row). A later stage takes the hidden
    states that were given to ``model.set_input_tensor``.
    """
    longest = int(row.positions.max()) + 1
    device = next(model.parameters()).device
    share = ContextShare.of(len(row.ids), place)
    held = slice(None) if share is None else share.held
    freqs = model.rotary_pos_emb.get_freqs_non_repeated(longest)
    angles = freqs[row.positions[held]].to(device)
    rotary = torch.cat((angles, angles), dim=-1)[:, None, None, :]  # [tokens, 1, 1, head_dim]
    hidden = None
    if place.first_stage:
        ids = row.ids[held][None].to(device)
        hidden = model.embedding(input_ids=ids, position_ids=None)
    hidden = model.decoder(
        hidden_states=hidden,
        attention_mask=None,
        rotary_pos_emb=rotary,
        packed_seq_params=ChainParams(chains=row.chains, share=share),
    )
    return hidden, share


def next_logits(model: GPTModel, row: PackedRow, places: Tensor) -> Tensor:
    """Logits [places, vocabulary] of what follows the row's tokens at ``places``.

    The output layer, the largest matrix of a small model, sees only the rows that are wanted.
    """
    hidden, _ = run_stage(model, row, Place())
    return _logits(model, hidden, places)


def _logits(model: GPTModel, hidden: Tensor, places: Tensor) -> Tensor:
    weight = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else None
    )
    logits, _ = model.output_layer(hidden[places.to(hidden.device)], weight=weight)
    return logits[:, 0]


def target_logprobs(model: GPTModel, row: PackedRow) -> Tensor:
    """Natural log-probabilities [targets] of the row's targets at temperature 1, float32.

    They lie in main memory, where objectives are computed. Where several targets follow one token,
    the distribution that they were drawn from is computed once.
    """
    return outcome(model, run_stage(model, row, Place()), row, Place(), entropies=False)[0]


def outcome(
    model: GPTModel,
    found: tuple[Tensor, ContextShare | None],
    row: PackedRow,
    place: Place,
    *,
    entropies: bool,
) -> tuple[Tensor, Tensor | None]:
    """What the last stage tells of a row after ``run_stage``: the same in all its tensor and
    context ranks.

    Returns:
        ``target_logprobs``; and with ``entropies`` those [targets] in nats, without gradient, of
        the distributions that the targets were drawn from.
    """
    hidden, share = found
    if place.layout.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    before, labels = row.before, row.labels
    mine = None
    if share is not None:
        mine = torch.isin(before, share.held).nonzero()[:, 0]
        before, labels = share.inside[before[mine]], labels[mine]
    most = max(1, LOGIT_ELEMENTS // len(place.words(model.shape)))
    parts = [
        (model, hidden, some, wanted, place, entropies)
        for some, wanted in zip(before.split(most), labels.split(most), strict=True)
    ]
    if len(parts) == 1:
        told = [_part(*parts[0])]
    else:
        # The logits of a part are computed again in the backward pass: all of them at once would
        # take more memory than the rest of a long row.
        told = [checkpoint(_part, *part, use_reentrant=False) for part in parts]
    logprobs = torch.cat([one for one, _ in told])
    spread = torch.cat([other for _, other in told]) if entropies else None
    if mine is not None:
        group = parallel_state.get_context_parallel_group()
        logprobs = _everywhere(logprobs, mine, len(row.labels), group)
        if spread is not None:
            spread = _everywhere(spread, mine, len(row.labels), group)
    return logprobs.cpu(), None if spread is None else spread.cpu()


def _part(
    model: GPTModel, hidden: Tensor, before: Tensor, labels: Tensor, place: Place, entropies: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of targets that follow the hidden states at ``before``."""
    places, choice = torch.unique(before, return_inverse=True)
    logits = _logits(model, hidden, places).float()
    choice, labels = choice.to(logits.device), labels.to(logits.device)
    if place.layout.tensor == 1:
        return _whole(logits, choice, labels, entropies)
    return _shared_words(logits, choice, labels, entropies, model, place)


def _whole(
    logits: Tensor, choice: Tensor, labels: Tensor, entropies: bool
) -> tuple[Tensor, Tensor | None]:
    """Of logits [places, vocabulary]; target i is drawn at place ``choice[i]``."""
    logprobs = logits.log_softmax(dim=-1)
    spread = None
    if entropies:
        # In parts: another matrix as large as the logits might not fit beside them.
        parts = logprobs.detach().split(_ENTROPY_ROWS)
        spread = torch.cat([-(part.exp() * part).nansum(dim=-1) for part in parts])[choice]
    return logprobs[choice, labels], spread


def _shared_words(
    logits: Tensor,
    choice: Tensor,
    labels: Tensor,
    entropies: bool,
    model: GPTModel,
    place: Place,
) -> tuple[Tensor, Tensor | None]:
    """As ``_whole``, of this rank's logits [places, words]: none has them all.

    The sums over the vocabulary are over ranks. Their gradient goes back to each rank as it is:
    all ranks compute the same loss.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    words = place.words(model.shape)
    logits = logits[:, : len(words)]  # the last rank's padding is no word
    highest = logits.detach().max(dim=-1).values
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - highest[:, None]
    exponents = shifted.exp()
    total = reduce_from_tensor_model_parallel_region(exponents.sum(dim=-1), group)
    own = (labels >= words.start) & (labels < words.stop)
    at = torch.where(own, labels - words.start, 0)
    picked = torch.where(own, shifted[choice, at], 0.0)
    chosen = reduce_from_tensor_model_parallel_region(picked, group)
    log_total = total.log()
    spread = None
    if entropies:
        with torch.no_grad():
            weighted = (exponents * shifted).sum(dim=-1)
            dist.all_reduce(weighted, group=group)
            spread = (log_total - weighted / total)[choice]
    return chosen - log_total[choice], spread


def _everywhere(values: Tensor, at: Tensor, count: int, group: Any) -> Tensor:
    """[count] values of which each context rank has those ``at`` its places; in all of them."""
    empty = values.new_zeros(count)
    return reduce_from_tensor_model_parallel_region(
        empty.index_put((at.to(values.device),), values), group
    )
