"""The policy: where its weights come from, its shape, and how it is first fitted."""

from __future__ import annotations

from enum import StrEnum

from pydantic import field_validator, model_validator

from configs.field import Section, absolute_path, setting


class ModelSource(StrEnum):
    """Where the first weights of a run come from."""

    WARM_START = "warm_start"
    HF_DIRECTORY = "hf_directory"


class ModelFamily(StrEnum):
    """Architectures that can be trained, by the model_type of their config.json."""

    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    LLAMA = "llama"


class ModelShape(Section):
    """Sizes of a decoder: of the one that the warm start makes, or of an HF directory that is not
    there yet. One that is there brings its own."""

    family: ModelFamily = setting(
        ModelFamily.QWEN3, "Architecture; the warm start makes qwen3 models."
    )

    layers: int = setting(3, "Decoder layers.", unit="layers", ge=1, le=256)
    hidden: int = setting(128, "Width of the residual stream.", unit="features", ge=16, le=32768)
    heads: int = setting(4, "Attention heads.", unit="heads", ge=1, le=512)
    kv_heads: int = setting(2, "Key-value heads; divides heads.", unit="heads", ge=1, le=512)
    head_dim: int = setting(64, "Width of one head.", unit="features", ge=8, le=1024)
    ffn: int = setting(384, "Width of the gated MLP.", unit="features", ge=16, le=262144)
    vocabulary: int = setting(
        768, "Most tokens that the tokenizer may learn.", unit="tokens", ge=300, le=1_000_000
    )
    rope_theta: float = setting(10_000.0, "Base of the rotary embedding.", unit="1", ge=1, le=1e9)
    tied: bool = setting(True, "Share the input embedding with the output layer.")
    experts: int = setting(
        0, "Experts of a layer, with qwen3_moe; 0 is a plain MLP.", unit="experts", ge=0, le=65_536
    )
    experts_per_token: int = setting(
        8, "Experts that compute a token.", unit="experts", ge=1, le=1024
    )
    expert_ffn: int = setting(
        768, "Width of one expert's gated MLP.", unit="features", ge=8, le=262_144
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if (self.family is ModelFamily.QWEN3_MOE) is not (self.experts > 0):
            raise ValueError(
                f"family {self.family} with {self.experts} experts: qwen3_moe has some, others none"
            )
        if 0 < self.experts < self.experts_per_token:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})"
            )
        return self


class ModelConfig(Section):
    """The policy of a run."""

    source: ModelSource = setting(
        ModelSource.WARM_START, "warm_start fits a small model; hf_directory loads one from `path`."
    )
    path: str | None = setting(
        None,
        "HF directory of a Qwen3, Qwen3-MoE or Llama model (config.json, safetensors, tokenizer); "
        "with hf_directory.",
        max_length=4096,
    )
    shape: ModelShape = setting(
        ModelShape(),
        "Sizes of the model that the warm start makes, or that is planned with until `path` is "
        "there.",
    )
    context: int = setting(
        768,
        "Longest context that is served and trained.",
        unit="tokens",
        ge=64,
        le=1_048_576,
    )
    renderer: str = setting(
        "cells.gateway.terse:TerseRenderer",
        "Message-to-token renderer: a name of the `renderers` package (qwen3, glm45, ...) or an "
        "import path module:Class.",
        min_length=1,
        max_length=256,
    )

    _absolute = field_validator("path")(absolute_path)

    @model_validator(mode="after")
    def _path_fits_source(self) -> ModelConfig:
        if (self.source is ModelSource.HF_DIRECTORY) != (self.path is not None):
            raise ValueError("path must be given with source hf_directory, and only with it")
        warm = self.source is ModelSource.WARM_START
        if warm and self.shape.family is not ModelFamily.QWEN3:
            raise ValueError(f"the warm start makes qwen3 models, not {self.shape.family}")
        return self


class WarmStartConfig(Section):
    """Fitting of the first policy to scripted demonstrations (used with source warm_start)."""

    drill_steps: int = setting(
        160, "Steps of the copy drill that comes first.", unit="steps", ge=1, le=1_000_000
    )
    clean_steps: int = setting(
        120, "Steps on clean, small demonstrations.", unit="steps", ge=1, le=1_000_000
    )
    full_steps: int = setting(
        300, "Steps on demonstrations of the real task.", unit="steps", ge=1, le=1_000_000
    )
    histories: int = setting(
        12, "Histories of demonstrations in a step.", unit="histories", ge=1, le=65_536
    )
    error_share: float = setting(
        1.0,
        "Scale of the scripted mistakes in the demonstrations: 0 makes them clean.",
        unit="factor",
        ge=0,
        le=1,
    )
    delegate_share: float = setting(
        0.2,
        "Share of the demonstrations in which parts of the work are handed to sub-agents.",
        unit="share",
        ge=0,
        le=1,
    )
    muon_learning_rate: float = setting(
        0.015, "Muon step for the matrices of the blocks.", unit="1", gt=0, le=1
    )
    adam_learning_rate: float = setting(
        3e-3, "AdamW step for every other parameter.", unit="1", gt=0, le=1
    )
    processes: int = setting(
        2, "Data-parallel processes of one core each.", unit="processes", ge=1, le=64
    )
    limit_s: float = setting(
        1800, "Longest time that the warm start may take.", unit="seconds", ge=1, le=604_800
    )
