"""Objectives for tests, loaded by replicas by their import path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cells.replica.objective import Targets
from configs.training import ObjectiveConfig


class SequenceRatio:
    """Minus advantage times the ratio of the sequence; clips nothing, counts ratios above one."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def __call__(self, targets: Targets) -> tuple[Tensor, dict[str, float]]:
        ratio = (targets.policy - targets.behaviour).mean().exp()
        above = float(ratio.detach() > 1)
        return -ratio * targets.advantage, {"ratio": float(ratio.detach()), "clipped": above}


class Infinite(SequenceRatio):
    """A loss whose gradient is not finite."""

    def __call__(self, targets: Targets) -> tuple[Tensor, dict[str, float]]:
        loss, stats = super().__call__(targets)
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

    def __call__(self, targets: Targets) -> tuple[Tensor, dict[str, float]]:
        if targets.advantage < 0:
            targets = replace(targets, policy=_Broken.apply(targets.policy))
        return super().__call__(targets)


class Refusing(SequenceRatio):
    """Fails on every sample before anything is differentiated."""

    def __call__(self, targets: Targets) -> tuple[Tensor, dict[str, float]]:
        raise ZeroDivisionError("this objective never works")


class ToAnchors(SequenceRatio):
    """The ratio is to the proximal policy; tells what each policy gives to the targets."""

    def __call__(self, targets: Targets) -> tuple[Tensor, dict[str, float]]:
        proximal, reference = targets.of_proximal(), targets.of_reference()
        loss, stats = super().__call__(replace(targets, behaviour=proximal))
        for name, found in (("proximal", proximal), ("reference", reference)):
            assert not found.requires_grad
            stats[name] = float(found.sum())
        return loss, stats
