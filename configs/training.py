"""From recorded calls to weights: trajectories, objective, updates, checkpoints."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from configs.field import Section, setting


class WithinKind(StrEnum):
    """Which trajectory of a kind is taken first."""

    MOST_TARGETS = "most_targets"
    LATEST = "latest"


class TrajectoryConfig(Section):
    """Which paths of an execution's call tree are trained."""

    cap: int | None = Field(
        default=5,
        ge=1,
        le=1_000_000,
        description="Most trajectories of an execution; none is unlimited.",
        json_schema_extra={"unit": "trajectories"},
    )
    within_kind: WithinKind = setting(
        WithinKind.MOST_TARGETS, "Order of the trajectories of one kind."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=16,
        le=16_777_216,
        description="Longest trajectory; a longer one is cut after its last call that fits. none "
        "is model.context, which is never exceeded.",
        json_schema_extra={"unit": "tokens"},
    )


class ExecutionMean(StrEnum):
    """What the loss of an execution averages over."""

    TRAJECTORY = "trajectory"
    TOKEN = "token"


class UpdateMean(StrEnum):
    """Which executions an update is divided by."""

    WITH_SPREAD = "with_spread"
    ALL_VALID = "all_valid"


class Baseline(StrEnum):
    """What a reward is compared with."""

    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"


class ObjectiveConfig(Section):
    """The loss."""

    name: str = setting(
        "gspo", "Objective: gspo, or an import path module:Class.", min_length=1, max_length=256
    )
    clip_low: float = setting(3e-4, "The ratio is clipped below at 1 - this.", unit="1", ge=0, lt=1)
    clip_high: float = setting(
        4e-4, "The ratio is clipped above at 1 + this.", unit="1", ge=0, le=100
    )
    execution_mean: ExecutionMean = setting(
        ExecutionMean.TRAJECTORY,
        "An execution's loss is the mean over its trajectories, or weighted by target tokens.",
    )
    update_mean: UpdateMean = setting(
        UpdateMean.WITH_SPREAD,
        "Divide an update by its executions in groups with spread, or by all valid ones.",
    )
    baseline: Baseline = setting(
        Baseline.MEAN,
        "Advantages compare a reward with the mean of its group, or of the other members.",
    )
    normalise_std: bool = setting(True, "Divide advantages by the group's standard deviation.")
    epsilon: float = setting(
        1e-4, "Added to the standard deviation of a group.", unit="1", ge=0, le=1
    )


class PackKind(StrEnum):
    """How samples lie in a micro-step."""

    TREE = "tree"
    FLAT = "flat"


class TrainingConfig(Section):
    """Updates and checkpoints."""

    steps: int = setting(6, "RL steps of the run.", unit="steps", ge=1, le=1_000_000)
    updates_per_step: int = setting(4, "Updates of a step.", unit="updates", ge=1, le=1024)
    learning_rate: float = setting(5e-4, "AdamW learning rate.", unit="1", gt=0, le=1)
    warmup_updates: int = setting(
        0, "Updates over which the rate rises from zero.", unit="updates", ge=0, le=1_000_000
    )
    beta1: float = setting(0.9, "AdamW beta 1.", unit="1", ge=0, lt=1)
    beta2: float = setting(0.95, "AdamW beta 2.", unit="1", ge=0, lt=1)
    weight_decay: float = setting(0.0, "AdamW weight decay.", unit="1", ge=0, le=10)
    clip_norm: float = setting(1.0, "Global gradient norm.", unit="1", gt=0, le=1e6)
    micro_step_tokens: int = setting(
        2048,
        "Tokens of a micro-step; with pack tree a shared prefix counts once.",
        unit="tokens",
        ge=16,
        le=16_777_216,
    )
    pack: PackKind = setting(
        PackKind.TREE,
        "tree computes a prefix that samples of a micro-step share once, flat computes each sample "
        "by itself; the gradient is the same.",
    )
    checkpoint_every: int = setting(
        0,
        "Checkpoint after every so many updates as well as at the end of a step; 0 only there.",
        unit="updates",
        ge=0,
        le=1_000_000,
    )
    keep_checkpoints: int = setting(
        3, "Checkpoints that are kept.", unit="checkpoints", ge=1, le=10_000
    )
    micro_step_limit_s: float = setting(
        300, "Longest time of a micro-step.", unit="seconds", ge=1, le=86_400
    )
    objective: ObjectiveConfig = setting(ObjectiveConfig(), "The loss.")

    @model_validator(mode="after")
    def _checkpoint_inside_step(self) -> TrainingConfig:
        if self.checkpoint_every > self.updates_per_step:
            raise ValueError(
                f"checkpoint_every ({self.checkpoint_every}) is larger than updates_per_step "
                f"({self.updates_per_step}); a step always ends with a checkpoint"
            )
        return self


class StalenessConfig(Section):
    """How old a rollout may be when it is trained."""

    max: int = setting(
        8, "Largest version difference of a target token.", unit="updates", ge=0, le=1024
    )
