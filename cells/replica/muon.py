"""Muon for the matrices of the blocks.

The update of a matrix is its momentum, made nearly orthogonal by a Newton-Schulz iteration (Jordan
et al., "Muon: an optimizer for hidden layers in neural networks", 2024). torch has a Muon as well;
this one differs in two points that a small model on a CPU needs: matrices that Megatron fuses
(query, key and value; gate and up) are orthogonalised part by part, and all matrices of one size
are iterated together in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cells.replica.links import Fusion, links
from cells.replica.shape import PolicyShape

# Coefficients of the quintic iteration, from the publication: they push every singular value
# into about [0.7, 1.2] within five rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
_MOMENTUM = 0.95


class Muon:
    """Nesterov momentum, orthogonalised, without weight decay.

    Args:
        weights: Megatron weights by name; updated in place.
        gradients: gradients of the same names.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], shape: PolicyShape
    ) -> None:
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self.names = [link.megatron for link in links(shape) if _in_block(link.megatron, weights)]
        fusions = {link.megatron: link.fusion for link in links(shape)}
        for name in self.names:
            parts = zip(
                _parts(weights[name], fusions[name], shape),
                _parts(gradients[name], fusions[name], shape),
                strict=True,
            )
            for weight, gradient in parts:
                rows, columns = weight.flatten(0, 1).shape
                groups.setdefault((rows, columns), []).append((weight, gradient))
        self._groups = [
            (size, pairs, pairs[0][0].new_zeros(len(pairs), *size))
            for size, pairs in groups.items()
        ]

    def step(self, rate: float) -> None:
        """One update of every matrix with learning rate ``rate``."""
        with torch.no_grad():
            for (rows, columns), pairs, momentum in self._groups:
                gradient = torch.stack([part.flatten(0, 1) for _, part in pairs])
                momentum.mul_(_MOMENTUM).add_(gradient)
                update = orthogonal(gradient.add_(momentum, alpha=_MOMENTUM))
                scale = -rate * max(1.0, rows / columns) ** 0.5
                for (weight, _), direction in zip(pairs, update, strict=True):
                    weight.add_(direction.view(weight.shape), alpha=scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with their singular values pushed towards one."""
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def _in_block(name: str, weights: Mapping[str, Tensor]) -> bool:
    return ".layers." in name and weights[name].dim() == 2


def _parts(whole: Tensor, fusion: Fusion, shape: PolicyShape) -> Sequence[Tensor]:
    """Views [groups, rows, columns] of the matrices that lie in ``whole``."""
    if fusion is Fusion.NONE:
        return [whole[None]]
    if fusion is Fusion.GATE_UP:
        return [part[None] for part in whole.chunk(2)]
    per_group = shape.heads // shape.kv_heads * shape.head_dim
    grouped = whole.view(shape.kv_heads, -1, shape.hidden)
    return list(grouped.split([per_group, shape.head_dim, shape.head_dim], dim=1))
