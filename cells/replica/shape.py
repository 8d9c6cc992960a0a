"""Sizes of a policy, read from its HF ``config.json``: Qwen3, Qwen3-MoE and Llama."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Family(StrEnum):
    """Architectures that can be trained, by the ``model_type`` of their ``config.json``."""

    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    LLAMA = "llama"


ARCHITECTURES = {
    Family.QWEN3: "Qwen3ForCausalLM",
    Family.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Family.LLAMA: "LlamaForCausalLM",
}


class ShapeError(ValueError):
    """A model that the replica can't train; the text names the file, the key and its value."""


@dataclass(frozen=True)
class Experts:
    """The experts that stand in the place of each layer's MLP."""

    count: int
    per_token: int
    ffn: int
    """Width of one expert's gated MLP."""
    normalised: bool
    """The weights of a token's experts add up to one."""


@dataclass(frozen=True)
class PolicyShape:
    """What the weights of a decoder look like."""

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
    qk_norm: bool = True
    """Queries and keys are normalised per head; not in Llama."""
    experts: Experts | None = None


def read_shape(config: Path) -> PolicyShape:
    """The shape that an HF ``config.json`` describes.

    Raises:
        ShapeError: no such file, another architecture, or a feature that is not supported.
    """
    try:
        data: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeError(f"{config}: can't be read as JSON: {error}") from error
    family = _family(data, config)
    rope = data.get("rope_parameters") or {}
    scaling = data.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    plain = {
        "rope_type": (kind, "default"),
        "hidden_act": (data.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(data.get("attention_bias")), False),
        "mlp_bias": (bool(data.get("mlp_bias")), False),
        "use_sliding_window": (bool(data.get("use_sliding_window")), False),
        "decoder_sparse_step": (data.get("decoder_sparse_step", 1), 1),
        "mlp_only_layers": (data.get("mlp_only_layers") or [], []),
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
            qk_norm=family is not Family.LLAMA,
            experts=_experts(data) if family is Family.QWEN3_MOE else None,
        )
    except KeyError as error:
        raise ShapeError(f"{config}: the key {error} is missing") from None


def _family(data: dict[str, Any], config: Path) -> Family:
    named = data.get("architectures")
    supported = ", ".join(f"{name} (model_type {kind})" for kind, name in ARCHITECTURES.items())
    try:
        family = Family(str(data.get("model_type")))
    except ValueError:
        family = None
    if family is None or named not in (None, [ARCHITECTURES[family]]):
        raise ShapeError(
            f"{config}: model_type {data.get('model_type')!r}, architectures {named}: only "
            f"{supported} can be trained"
        )
    return family


def _experts(data: dict[str, Any]) -> Experts:
    return Experts(
        # Renamed between releases of transformers.
        count=data["num_local_experts"] if "num_local_experts" in data else data["num_experts"],
        per_token=data["num_experts_per_tok"],
        ffn=data["moe_intermediate_size"],
        normalised=bool(data.get("norm_topk_prob", False)),
    )
