"""Objectives for tests, loaded by replicas by their import path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from configs.training import ObjectiveConfig


class SequenceRatio:
    """Minus advantage times the ratio of the sequence; clips nothing, counts ratios above one."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, advantage: float
    ) -> tuple[Tensor, dict[str, float]]:
        ratio = (logprobs - behaviour).mean().exp()
        above = float(ratio.detach() > 1)
        return -ratio * advantage, {"ratio": float(ratio.detach()), "clipped": above}


class Infinite(SequenceRatio):
    """A loss whose gradient is not finite."""

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, advantage: float
    ) -> tuple[Tensor, dict[str, float]]:
        loss, stats = super().__call__(logprobs, behaviour, advantage)
        return loss * float("inf"), stats


class _Broken(torch.autograd.Function):
    """Identity whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("no way back")


class BrokenBelow(SequenceRatio):
    """The backward pass of a sample with a negative advantage fails."""

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, advantage: float
    ) -> tuple[Tensor, dict[str, float]]:
        return super().__call__(
            _Broken.apply(logprobs) if advantage < 0 else logprobs, behaviour, advantage
        )


class Refusing(SequenceRatio):
    """Fails on every sample before anything is differentiated."""

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, advantage: float
    ) -> tuple[Tensor, dict[str, float]]:
        raise ZeroDivisionError("this objective never works")
