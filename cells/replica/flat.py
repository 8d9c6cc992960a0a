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
    """The parameters of a model as views of two float32 buffers [parameters].

    ``named`` maps each parameter's name to it, in a fixed order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.named: dict[str, nn.Parameter] = dict(model.named_parameters())
        for name, parameter in self.named.items():
            if parameter.dtype != torch.float32:
                raise TypeError(f"{name} is {parameter.dtype}: weights must be float32")
        device = next(iter(self.named.values())).device
        total = sum(parameter.numel() for parameter in self.named.values())
        self.weights = torch.empty(total, device=device)
        self.gradients = torch.zeros(total, device=device)
        start = 0
        for parameter in self.named.values():
            end = start + parameter.numel()
            weight = self.weights[start:end].view_as(parameter)
            weight.copy_(parameter.data)
            parameter.data = weight
            parameter.grad = self.gradients[start:end].view_as(parameter)
            start = end

    def move_gradients(self, buffer: Tensor) -> None:
        """Keep the gradients, zeroed, in ``buffer`` [parameters]: memory that others may read."""
        self.gradients = buffer
        self.zero_gradients()
        for parameter, gradient in zip(
            self.named.values(), self.split(buffer).values(), strict=True
        ):
            parameter.grad = gradient

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
