"""Sizes of a Qwen3 policy, read from its HF ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "Qwen3ForCausalLM"


class ShapeError(ValueError):
    """A model that the replica can't train; the text names the file, the key and its value."""


@dataclass(frozen=True)
class PolicyShape:
    """What the weights of a Qwen3 decoder look like."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int
    """Longest document in tokens."""
    norm_epsilon: float
    rope_theta: float
    tied: bool
    """The output layer is the input embedding."""
    initial_std: float
    """Standard deviation of freshly made matrices."""


def read_shape(config: Path) -> PolicyShape:
    """The shape that an HF ``config.json`` describes.

    Raises:
        ShapeError: no such file, another architecture, or a feature that is not supported.
    """
    try:
        data: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeError(f"{config}: can't be read as JSON: {error}") from error
    architectures = data.get("architectures") or [ARCHITECTURE]
    if data.get("model_type") != "qwen3" or architectures != [ARCHITECTURE]:
        raise ShapeError(
            f"{config}: model_type {data.get('model_type')!r}, architectures {architectures}: "
            f"only {ARCHITECTURE} (model_type qwen3) can be trained"
        )
    rope = data.get("rope_parameters") or {}
    scaling = data.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    plain = {
        "rope_type": (kind, "default"),
        "hidden_act": (data.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(data.get("attention_bias")), False),
        "use_sliding_window": (bool(data.get("use_sliding_window")), False),
    }
    for key, (found, supported) in plain.items():
        if found != supported:
            raise ShapeError(f"{config}: {key} is {found!r}, only {supported!r} is supported")
    try:
        return PolicyShape(
            layers=data["num_hidden_layers"],
            hidden=data["hidden_size"],
            heads=data["num_attention_heads"],
            kv_heads=data["num_key_value_heads"],
            head_dim=data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"],
            ffn=data["intermediate_size"],
            vocabulary=data["vocab_size"],
            context=data["max_position_embeddings"],
            norm_epsilon=data["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0),
            tied=bool(data.get("tie_word_embeddings", False)),
            initial_std=float(data.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise ShapeError(f"{config}: the key {error} is missing") from None
