"""The core's optimizer: AdamW on float32 weights, its state shared out over ranks where asked.

torch's own AdamW, not Megatron's wrapper of it: that one asserts CUDA tensor types, and its state
does not come back from a checkpoint on a CPU. What Megatron's distributed optimizer does is small
on one flat buffer: each rank steps its part of it, then all exchange the parts (Rajbhandari et al.,
ZeRO, 2020, stage 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cells.replica.cpu_support import megatron_imports
from cells.replica.flat import FlatModel, is_expert
from cells.replica.links import Cut, links
from cells.replica.place import Place
from cells.replica.shape import PolicyShape
from cells.replica.weights import writes

with megatron_imports():
    from megatron.core import parallel_state

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Part:
    """What this rank steps of one parameter."""

    name: str
    start: int
    """In the parameter, flattened."""
    master: nn.Parameter
    """float32: the weights themselves, or a copy where they are of less precision."""


class Optimizer:
    """AdamW with decoupled decay of matrices; norms are not decayed."""

    def __init__(
        self,
        flat: FlatModel,
        shape: PolicyShape,
        place: Place,
        *,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self._flat = flat
        self._shape = shape
        self._place = place
        self.parts = list(self._parts())
        groups = [
            {
                "params": [part.master for part in self.parts if self._matrix(part) is decayed],
                "weight_decay": weight_decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas
        )

    def step(self, rate: float) -> None:
        """One update of the weights with learning rate ``rate``, in all ranks."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self._point()
        self.adam.step()
        weights = self._flat.weights
        if weights.dtype != torch.float32:
            for part in self.parts:
                own = self._flat.named[part.name].data.view(-1)
                own[part.start : part.start + part.master.numel()].copy_(part.master.data.view(-1))
        if self._place.layout.distributed_optimizer:
            for start, stop, group in sections(self._flat):
                for rank, (first, last) in enumerate(_chunks(start, stop, group.size())):
                    source = dist.get_global_rank(group, rank)
                    dist.broadcast(weights[first:last], source, group=group)

    def gathered(self, kind: str, name: str) -> Tensor:
        """The master weights or a moment of a parameter, whole, float32; all ranks that share it
        ask at once. Before the first step a moment is zero."""
        parameter = self._flat.named[name]
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        for part in self.parts:
            if part.name != name:
                continue
            stop = part.start + part.master.numel()
            if kind == "weights":
                whole[part.start : stop] = part.master.data.view(-1)
            elif part.master in self.adam.state:
                whole[part.start : stop] = self.adam.state[part.master][kind].view(-1)
        if self._place.layout.distributed_optimizer:
            dist.all_reduce(whole, group=_sharing(name))
        return whole.view_as(parameter)

    @property
    def steps(self) -> float:
        """Updates that are in the moments."""
        states = [self.adam.state[p.master] for p in self.parts if p.master in self.adam.state]
        return float(states[0]["step"]) if states else 0.0

    def restore(self, kind: str, name: str, whole: Tensor, steps: float) -> None:
        """Take master weights or a moment of a parameter; the optimizer must be fresh."""
        for part in self.parts:
            if part.name != name:
                continue
            own = whole.flatten()[part.start : part.start + part.master.numel()]
            own = own.view_as(part.master).to(part.master.device, torch.float32)
            if kind == "weights":
                part.master.data.copy_(own)
            else:
                state: dict[str, Any] = self.adam.state[part.master]
                state["step"] = torch.tensor(steps)
                state[kind] = own.clone()

    def _parts(self) -> Iterator[Part]:
        flat = self._flat
        copies = flat.weights.dtype != torch.float32
        spans = [(0, len(flat.weights))]
        shared = self._place.layout.distributed_optimizer
        if shared:
            spans = [
                _chunks(start, stop, group.size())[group.rank()]
                for start, stop, group in sections(flat)
            ]
        at = 0
        for name, parameter in flat.named.items():
            for first, last in spans:
                start, stop = max(at, first), min(at + parameter.numel(), last)
                if start >= stop:
                    continue
                own = parameter.data.view(-1)[start - at : stop - at]
                if not shared:
                    own = parameter.data
                yield Part(name, start - at, nn.Parameter(own.float() if copies else own))
            at += parameter.numel()

    def _point(self) -> None:
        """The gradients of the parts: views, that may have moved since the last step."""
        gradients = self._flat.split(self._flat.gradients)
        for part in self.parts:
            own = gradients[part.name].view(-1)[part.start : part.start + part.master.numel()]
            part.master.grad = own.view_as(part.master)

    def _matrix(self, part: Part) -> bool:
        return bool(self._flat.named[part.name].dim() > 1)


def finish(flat: FlatModel, shape: PolicyShape, place: Place) -> None:
    """Make each rank's sums those of the whole replica. Sums are linear: once at the end of an
    update does for all its micro-steps, those that came from other replicas included."""
    if place.alone:
        return
    for start, stop, group in sections(flat):
        dist.all_reduce(flat.gradients[start:stop], group=group)
    layout = place.layout
    gradients = flat.split(flat.gradients)
    if layout.tensor > 1:
        # Each rank saw only its heads, or its tokens.
        tensor = parallel_state.get_tensor_model_parallel_group()
        for link in links(shape, place):
            heads = "q_layernorm" in link.megatron or "k_layernorm" in link.megatron
            if heads or (layout.sequence_parallel and link.cut is Cut.NONE and not link.expert):
                dist.all_reduce(gradients[link.megatron], group=tensor)
    if shape.tied and layout.pipeline > 1 and (place.first_stage or place.last_stage):
        name = "embedding.word_embeddings.weight" if place.first_stage else "output_layer.weight"
        dist.all_reduce(gradients[name], group=parallel_state.get_embedding_group())


def gradient_norm(flat: FlatModel, shape: PolicyShape, place: Place) -> float:
    """Euclidean norm of the gradient of the whole model, after ``finish``; the same in all ranks.

    What several ranks hold counts once.
    """
    if place.alone:
        return float(torch.linalg.vector_norm(flat.gradients, dtype=torch.float64))
    gradients = flat.split(flat.gradients)
    mine = [gradients[link.megatron] for link in links(shape, place) if writes(link, place)]
    total = torch.zeros((), dtype=torch.float64)
    for gradient in mine:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).cpu() ** 2
    dist.all_reduce(total)
    return float(total.sqrt())


def sections(flat: FlatModel) -> list[tuple[int, int, Any]]:
    """Parts of the flat buffers, each with the ranks that hold the same of it."""
    found = [(0, flat.dense, _sharing(""))]
    if flat.dense < len(flat.weights):
        found.append((flat.dense, len(flat.weights), _sharing(".mlp.experts.")))
    return found


def _sharing(name: str) -> Any:
    if is_expert(name):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _chunks(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    bounds = [start + (stop - start) * i // count for i in range(count + 1)]
    return list(pairwise(bounds))
