"""What can be known of a run's model and layout before any process is started."""

from __future__ import annotations

from pathlib import Path

from cells.replica.place import MASK_ELEMENTS, LayoutError, check_layout
from cells.replica.shape import Experts, PolicyShape, read_shape
from configs.cells import Device
from configs.layout import Attention, Precision
from configs.model import ModelConfig, ModelFamily
from configs.run import RunConfig
from configs.training import PackKind

_EPSILON, _STD = 1e-6, 0.02
"""No size depends on them."""


def planned_shape(model: ModelConfig) -> tuple[PolicyShape, str]:
    """The shape of a run's policy, and where it is from.

    Raises:
        ShapeError: the HF directory is there, and can't be trained.
    """
    found = Path(model.path) / "config.json" if model.path is not None else None
    if found is not None and found.is_file():
        return read_shape(found), str(found)
    sizes = model.shape
    experts = Experts(sizes.experts, sizes.experts_per_token, sizes.expert_ffn, True)
    shape = PolicyShape(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        ffn=sizes.ffn,
        vocabulary=sizes.vocabulary,
        context=model.context,
        norm_epsilon=_EPSILON,
        rope_theta=sizes.rope_theta,
        tied=sizes.tied,
        initial_std=_STD,
        qk_norm=sizes.family is not ModelFamily.LLAMA,
        experts=experts if sizes.experts else None,
    )
    return shape, "model.shape"


def check_model(config: RunConfig) -> None:
    """Refuse a layout that can't cut the model, or can't run on the device.

    Raises:
        ShapeError, LayoutError: the text has the settings and their values.
    """
    layout = config.cells.layout
    shape, where = planned_shape(config.model)
    check_layout(layout, shape, where)
    if layout.attention is Attention.TE:
        _check_transformer_engine(config)
    tokens = config.training.micro_step_tokens
    mask = tokens * tokens // layout.context if layout.context > 1 else 0
    if mask > MASK_ELEMENTS and config.cells.device is Device.CPU:
        raise LayoutError(
            f"training.micro_step_tokens ({tokens}) with cells.layout.context ({layout.context}) "
            f"on a CPU: a dense mask of {mask} elements, at most {MASK_ELEMENTS} are made"
        )
    if tokens < config.model.context and config.cells.device is Device.CUDA:
        raise LayoutError(
            f"training.micro_step_tokens ({tokens}) is smaller than model.context "
            f"({config.model.context}): memory is planned for rows of as many tokens"
        )


def _check_transformer_engine(config: RunConfig) -> None:
    layout = config.cells.layout
    wanted = [
        ("cells.device", config.cells.device.value, Device.CUDA.value, "it has kernels for GPUs"),
        ("cells.layout.precision", layout.precision.value, Precision.BF16.value, "and for bf16"),
        ("training.pack", config.training.pack.value, PackKind.FLAT.value, "it knows no trees"),
        ("cells.layout.context", layout.context, 1, "it shares rows out in another order"),
    ]
    for name, found, needed, why in wanted:
        if found != needed:
            raise LayoutError(
                f"cells.layout.attention is te, which needs {name} {needed}, not {found}: {why}; "
                f"or set it to auto"
            )
