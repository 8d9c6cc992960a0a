"""How one replica is spread over processes, and in which numbers it computes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import model_validator

from configs.field import Section, setting


class Precision(StrEnum):
    """Numbers of the weights that a replica computes with."""

    FP32 = "fp32"
    BF16 = "bf16"


class Attention(StrEnum):
    """What computes attention."""

    AUTO = "auto"
    TE = "te"


class LayoutConfig(Section):
    """The ranks of a replica: one process each, on a GPU of its own where there are GPUs.

    Every cell has the same layout, so that weights and gradients pass from rank to rank.
    """

    tensor: int = setting(1, "Ranks that share each matrix.", unit="ranks", ge=1, le=64)
    pipeline: int = setting(1, "Stages of consecutive layers.", unit="ranks", ge=1, le=256)
    data: int = setting(
        1, "Ranks that share out the samples of a micro-step.", unit="ranks", ge=1, le=4096
    )
    context: int = setting(
        1, "Ranks that share out the tokens of a row.", unit="ranks", ge=1, le=256
    )
    expert: int = setting(
        1,
        "Ranks that share out the experts of a layer; they are tensor, context and data ranks at "
        "the same time.",
        unit="ranks",
        ge=1,
        le=4096,
    )
    sequence_parallel: bool = setting(
        False, "Tensor ranks share out the tokens between their matrices, too."
    )
    recompute: bool = setting(
        False, "Compute a layer again in the backward pass instead of keeping what is inside it."
    )
    precision: Precision = setting(
        Precision.FP32,
        "fp32, or bf16 weights with fp32 gradients and, in the core, fp32 master weights.",
    )
    attention: Attention = setting(
        Attention.AUTO,
        "auto: torch's fused attention on a CPU, FlexAttention on GPUs. te: Transformer Engine, "
        "on GPUs with bf16, training.pack flat and context 1; not run on a GPU yet.",
    )
    distributed_optimizer: bool = setting(
        False, "Data and context ranks of the core share out master weights and moments."
    )

    @property
    def ranks(self) -> int:
        """Processes of a replica."""
        return self.tensor * self.pipeline * self.data * self.context

    @model_validator(mode="after")
    def _go_together(self) -> LayoutConfig:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel shares tokens among tensor ranks: tensor is 1")
        stage = self.tensor * self.context * self.data
        if stage % self.expert:
            raise ValueError(
                f"expert ({self.expert}) must divide tensor x context x data ({stage}), the ranks "
                f"of a pipeline stage"
            )
        if self.distributed_optimizer and self.data * self.context == 1:
            raise ValueError(
                "distributed_optimizer shares among data and context ranks: there is one"
            )
        return self
