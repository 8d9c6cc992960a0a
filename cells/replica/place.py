"""Which of a replica's ranks a process is, and which part of the model it holds.

Ranks are numbered as Megatron does: tensor ranks are next to each other, then context, data, and
pipeline ranks; rank 0 is the leader. Experts are never cut: an expert rank holds whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cells.replica.shape import PolicyShape
from configs.layout import LayoutConfig

LOGIT_ELEMENTS = 1 << 27
"""Logits that a rank computes at once: targets times words of the vocabulary."""

MASK_ELEMENTS = 1 << 24
"""Largest dense mask of attention on a CPU: tokens times those they attend to, 4,096 of each."""


class LayoutError(ValueError):
    """A layout that does not fit the model; the text has both numbers."""


@dataclass(frozen=True)
class Place:
    """One rank of a layout."""

    layout: LayoutConfig = field(default_factory=LayoutConfig)
    rank: int = 0

    @property
    def alone(self) -> bool:
        """The replica is one process."""
        return self.layout.ranks == 1

    @property
    def tensor(self) -> int:
        return self.rank % self.layout.tensor

    @property
    def context(self) -> int:
        return self.rank // self.layout.tensor % self.layout.context

    @property
    def data(self) -> int:
        return self.rank // (self.layout.tensor * self.layout.context) % self.layout.data

    @property
    def stage(self) -> int:
        return self.rank // self._stage_ranks

    @property
    def expert(self) -> int:
        return self.rank % self._stage_ranks % self.layout.expert

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.layout.pipeline - 1

    @property
    def reports(self) -> bool:
        """This rank tells the statistics of its data rank's samples; others have the same or
        none."""
        return self.last_stage and self.tensor == 0 and self.context == 0

    @property
    def writes_dense(self) -> bool:
        """No lower rank holds the same part of the matrices that all experts share."""
        return self.data == 0 and self.context == 0

    @property
    def writes_experts(self) -> bool:
        """No lower rank holds the same experts."""
        return self.rank % self._stage_ranks < self.layout.expert

    @property
    def _stage_ranks(self) -> int:
        return self.layout.tensor * self.layout.context * self.layout.data

    def layers(self, shape: PolicyShape) -> range:
        """Layers of this rank's stage."""
        each = shape.layers // self.layout.pipeline
        return range(self.stage * each, (self.stage + 1) * each)

    def experts(self, shape: PolicyShape) -> range:
        """Experts of each layer that this rank holds."""
        assert shape.experts is not None
        each = shape.experts.count // self.layout.expert
        return range(self.expert * each, (self.expert + 1) * each)

    def padded_vocabulary(self, shape: PolicyShape) -> int:
        """Rows of the embedding over all tensor ranks: each has as many."""
        return -(-shape.vocabulary // self.layout.tensor) * self.layout.tensor

    def words(self, shape: PolicyShape) -> range:
        """Ids whose rows of the embedding this rank holds; padding left out."""
        each = self.padded_vocabulary(shape) // self.layout.tensor
        start = self.tensor * each
        return range(min(start, shape.vocabulary), min(start + each, shape.vocabulary))

    @property
    def row_multiple(self) -> int:
        """Rows of tokens are padded to a multiple of this, so that every rank gets as many."""
        tokens = 2 * self.layout.context if self.layout.context > 1 else 1
        return tokens * (self.layout.tensor if self.layout.sequence_parallel else 1)


def check_layout(layout: LayoutConfig, shape: PolicyShape, where: str) -> None:
    """Refuse a layout that can't cut a model of that shape.

    Args:
        where: what to call the model in an error.

    Raises:
        LayoutError: a size is no multiple of the ranks that share it.
    """
    sizes = [
        ("heads", shape.heads, "tensor", layout.tensor),
        ("kv_heads", shape.kv_heads, "tensor", layout.tensor),
        ("ffn", shape.ffn, "tensor", layout.tensor),
        ("layers", shape.layers, "pipeline", layout.pipeline),
    ]
    if shape.experts is not None:
        if layout.tensor > 1 and not layout.sequence_parallel:
            raise LayoutError(f"{where}: experts with tensor above 1 need sequence_parallel")
        sizes = [size for size in sizes if size[0] != "ffn"]
        sizes.append(("experts", shape.experts.count, "expert", layout.expert))
    elif layout.expert > 1:
        raise LayoutError(f"{where}: expert is {layout.expert}, and the model has no experts")
    for what, size, name, ranks in sizes:
        if size % ranks:
            raise LayoutError(
                f"{where}: {what} ({size}) must be a multiple of the layout's {name} ({ranks})"
            )
