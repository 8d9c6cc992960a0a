"""What a layout needs of each GPU, and how long its weights take to move: arithmetic, no GPU.

Parameters are counted exactly, from the same links that cut the weights. Activations follow
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, with the
sizes of a gated MLP, grouped queries and attention that keeps no matrix of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from cells.replica.links import Link, links
from cells.replica.place import LOGIT_ELEMENTS, Place
from cells.replica.shape import PolicyShape
from configs.layout import LayoutConfig, Precision

_MASTER, _MOMENTS = 4, 8
_GB = 1e9
USABLE = 0.9
"""Share of a GPU's memory that is planned with; the rest is the driver's, buffers and holes."""


@dataclass(frozen=True)
class Machine:
    """What a GPU and its connections can do; bandwidths in GB/s for each GPU."""

    memory_gb: float = 80.0
    network: float = 50.0
    """Between cells."""
    host: float = 50.0
    """Between a GPU and its machine's memory, a page-locked copy over PCIe 5."""
    disk: float = 2.0
    """Of the shared storage that policies and checkpoints are written to."""


@dataclass(frozen=True)
class Needs:
    """Of the fullest rank, in GB. Host memory is beside the GPU's."""

    parameters: float
    """Billions, of this rank."""
    weights: float
    gradients: float
    optimizer: float
    """In the core; satellites have none."""
    activations: float
    """Of the rows of a micro-step."""
    logits: float
    host: float
    """Blocks that others read: gradient, and in the core two versions of the weights."""
    serving_weights: float
    """Of the engine on as many GPUs."""
    kv: float

    @property
    def satellite(self) -> float:
        return self.weights + self.gradients + self.activations + self.logits

    @property
    def core(self) -> float:
        return self.satellite + self.optimizer

    @property
    def serving(self) -> float:
        return self.serving_weights + self.kv


@dataclass(frozen=True)
class Moves:
    """Seconds, from bytes and bandwidths; starting kernels and answers of processes left out."""

    pull: float
    """A satellite takes the core's weights."""
    gradient: float
    """The core takes a satellite's gradient."""
    to_training: float
    """The engine's memory is given back; the replica's weights, and in the core the optimizer's
    state, come from the machine's memory."""
    to_rollout: float
    """The replica's memory goes to the machine's; the engine reads the weights."""
    checkpoint: float


@lru_cache
def total_parameters(shape: PolicyShape) -> tuple[int, int]:
    """Parameters of the model, and those that compute a token."""
    whole = active = 0
    for link in links(shape):
        size = sum(prod(part) for part in link.shapes)
        whole += size
        if link.expert:
            assert shape.experts is not None
            active += size * shape.experts.per_token // shape.experts.count
        else:
            active += size
    return whole, active


def needs(shape: PolicyShape, layout: LayoutConfig, *, row_tokens: int, kv_tokens: int) -> Needs:
    """Memory of the fullest GPU.

    Args:
        row_tokens: of a micro-step, over all context ranks.
        kv_tokens: of the engine's cache, over all GPUs of the cell.
    """
    width = 2 if layout.precision is Precision.BF16 else 4
    # The first stage has the embedding, the last one the logits.
    stages = {0, layout.pipeline - 1}
    stage_ranks = layout.ranks // layout.pipeline
    ranks = [Place(layout, stage * stage_ranks) for stage in sorted(stages)]
    found = [_rank_needs(shape, place, width, row_tokens, kv_tokens) for place in ranks]
    return max(found, key=lambda one: one.core)


def moves(shape: PolicyShape, layout: LayoutConfig, machine: Machine, found: Needs) -> Moves:
    """How long weights, gradients and memory take to move, all GPUs at once."""
    state = total_parameters(shape)[0] * (_MASTER + _MOMENTS) / _GB / layout.ranks
    return Moves(
        pull=found.weights / machine.network,
        gradient=found.gradients / machine.network,
        to_training=(found.weights + found.optimizer) / machine.host,
        to_rollout=(found.weights + found.optimizer + found.serving_weights) / machine.host,
        checkpoint=(state + found.serving_weights) / machine.disk,
    )


def _rank_needs(
    shape: PolicyShape, place: Place, width: int, row_tokens: int, kv_tokens: int
) -> Needs:
    layout = place.layout
    own = links(shape, place)
    dense = sum(_held(link, shape, place) for link in own if not link.expert)
    experts = sum(_held(link, shape, place) for link in own if link.expert)
    state = _MOMENTS + (_MASTER if width == 2 else 0)
    shared = layout.data * layout.context if layout.distributed_optimizer else 1
    copies = layout.ranks // layout.pipeline // layout.expert if layout.distributed_optimizer else 1
    parameters = dense + experts
    logits = 0.0
    if place.last_stage:
        # float32 logits, their softmax and its gradient, of the tokens that are computed at once.
        words = place.padded_vocabulary(shape) / layout.tensor
        logits = 3 * 4 * min(words * row_tokens / layout.context, LOGIT_ELEMENTS)
    cell = total_parameters(shape)[0] * 2 / layout.ranks
    heads = 2 * shape.kv_heads * shape.head_dim * shape.layers
    blocks = parameters * 4 + parameters * width * 2
    return Needs(
        parameters=parameters / _GB,
        weights=parameters * width / _GB,
        gradients=parameters * 4 / _GB,
        optimizer=state * (dense / shared + experts / copies) / _GB,
        activations=activation_bytes(shape, place, width, row_tokens) / _GB,
        logits=logits / _GB,
        host=blocks / _GB,
        serving_weights=cell / _GB,
        kv=heads * 2 * kv_tokens / layout.ranks / _GB,
    )


def _held(link: Link, shape: PolicyShape, place: Place) -> int:
    return sum(prod(piece.size) for piece in link.pieces(shape, place))


def activation_bytes(shape: PolicyShape, place: Place, width: int, row_tokens: float) -> float:
    """Bytes that a rank keeps for the backward pass. The rows of a micro-step, which are in flight
    together, have its tokens together.

    They follow ``row_tokens`` over context ranks, but for the keys and values that a layer gathers
    from all of them: with recomputation those of one layer, otherwise of each.
    """
    layout = place.layout
    tokens = row_tokens / layout.context
    scattered = tokens / (layout.tensor if layout.sequence_parallel else 1)
    layers = shape.layers // layout.pipeline
    layer = width * (
        scattered * 6 * shape.hidden  # inputs of norms, attention and MLP, and two sums
        + tokens * (3 * shape.heads + 2 * shape.kv_heads) * shape.head_dim / layout.tensor
        + _mlp(shape, layout, tokens, scattered)
    )
    keys = 2 * row_tokens * shape.kv_heads * shape.head_dim / layout.tensor * width
    gathered = keys if layout.context > 1 else 0
    if layout.recompute:
        return layers * scattered * shape.hidden * width + layer + gathered
    return layers * (layer + gathered)


def _mlp(shape: PolicyShape, layout: LayoutConfig, tokens: float, scattered: float) -> float:
    """Elements that the MLP of a layer keeps: gate, up, their product; experts in balance."""
    if shape.experts is None:
        return tokens * 3 * shape.ffn / layout.tensor
    return scattered * shape.experts.per_token * (3 * shape.experts.ffn + 2 * shape.hidden)
