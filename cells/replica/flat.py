"""All weights in one contiguous buffer, all gradients in another.

Megatron's DistributedDataParallel has such buffers too, with padding, hooks on every parameter and
collectives for a group; a replica is a group of one, and Mooncake wants one registered block. So
the parameters and their ``.grad`` are plain views here; autograd adds into an existing ``.grad`` in
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class FlatModel:
    """The parameters of a model as views of one buffer [parameters], and a float32 gradient of each
    in another.

    ``named`` maps each parameter's name to it, in a fixed order: first what all experts share, then
    the experts. Where the parameters are not float32, a gradient is added to its view as soon as
    autograd has it, and autograd's own is dropped: sums in bfloat16 would lose what is small.
    """

    def __init__(self, model: nn.Module) -> None:
        found = list(model.named_parameters())
        dense = [pair for pair in found if not is_expert(pair[0])]
        self.named: dict[str, nn.Parameter] = dict(
            dense + [pair for pair in found if is_expert(pair[0])]
        )
        first = next(iter(self.named.values()))
        for name, parameter in self.named.items():
            if parameter.dtype != first.dtype:
                raise TypeError(f"{name} is {parameter.dtype}, others are {first.dtype}")
        total = sum(parameter.numel() for parameter in self.named.values())
        self.dense = sum(parameter.numel() for _, parameter in dense)
        """Where the experts begin in both buffers."""
        self.weights = torch.empty(total, device=first.device, dtype=first.dtype)
        self.gradients = torch.zeros(total, device=first.device)
        start = 0
        for parameter in self.named.values():
            end = start + parameter.numel()
            weight = self.weights[start:end].view_as(parameter)
            weight.copy_(parameter.data)
            parameter.data = weight
            start = end
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._point(self.gradients)
        if first.dtype != torch.float32:
            for parameter in self.named.values():
                parameter.register_post_accumulate_grad_hook(self._add)

    def move_gradients(self, buffer: Tensor) -> None:
        """Keep the gradients, zeroed, in ``buffer`` [parameters]: memory that others may read."""
        self.gradients = buffer
        self.zero_gradients()
        self._point(buffer)

    def _point(self, buffer: Tensor) -> None:
        for parameter, gradient in zip(
            self.named.values(), self.split(buffer).values(), strict=True
        ):
            if parameter.dtype == torch.float32:
                parameter.grad = gradient
            else:
                self._sums[parameter] = gradient

    def _add(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._sums[parameter].add_(parameter.grad)
        parameter.grad = None

    def zero_gradients(self) -> None:
        self.gradients.zero_()

    @contextmanager
    def using(self, weights: Tensor) -> Iterator[None]:
        """Inside the block the model computes with other ``weights`` [parameters]; nothing is
        copied. Only for passes without gradient."""
        own = {name: parameter.data for name, parameter in self.named.items()}
        try:
            for name, view in self.split(weights).items():
                self.named[name].data = view
            yield
        finally:
            for name, data in own.items():
                self.named[name].data = data

    def split(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of a buffer that is laid out like ``weights``, by parameter name."""
        parts = buffer.split([parameter.numel() for parameter in self.named.values()])
        return {
            name: part.view_as(parameter)
            for (name, parameter), part in zip(self.named.items(), parts, strict=True)
        }


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one expert, by its name."""
    return ".mlp.experts." in name
