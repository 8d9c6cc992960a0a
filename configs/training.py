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


class RatioReference(StrEnum):
    """What an importance ratio is relative to."""

    BEHAVIOUR = "behaviour"
    PROXIMAL = "proximal"


class ObjectiveConfig(Section):
    """The loss."""

    name: str = setting(
        "gspo",
        "Objective: gspo, gspo_token, grpo, dapo, tis, or an import path module:Class.",
        min_length=1,
        max_length=256,
    )
    clip_low: float | None = setting(
        None,
        "The ratio is clipped below at 1 - this; none is what the objective was published with.",
        unit="1",
        ge=0,
        lt=1,
    )
    clip_high: float | None = setting(
        None,
        "The ratio is clipped above at 1 + this; none is what the objective was published with.",
        unit="1",
        ge=0,
        le=100,
    )
    ratio: RatioReference = setting(
        RatioReference.BEHAVIOUR,
        "The ratio is relative to the log-probs that were recorded (behaviour), or to those of the "
        "trainer with the weights of the step's start (proximal).",
    )
    importance_cap: float | None = setting(
        None,
        "With ratio proximal, targets are weighted with proximal / behaviour, at most this; none "
        "leaves it out. With tis, the largest weight; none is 2.",
        unit="1",
        gt=0,
        le=1e6,
    )
    kl: float = setting(
        0.0,
        "Weight of the KL divergence to the first policy of the run; above 0 costs a forward pass.",
        unit="1",
        ge=0,
        le=100,
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

    @model_validator(mode="after")
    def _go_together(self) -> ObjectiveConfig:
        proximal = self.ratio is RatioReference.PROXIMAL
        if self.name == "tis":
            if proximal:
                raise ValueError(
                    "tis weights with policy / behaviour and has no use for ratio=proximal; leave "
                    "it out, or take grpo with ratio=proximal and an importance_cap"
                )
            if self.clip_low is not None or self.clip_high is not None:
                raise ValueError(
                    "tis does not clip: leave clip_low and clip_high out; importance_cap bounds "
                    "its weights"
                )
        elif self.importance_cap is not None and not proximal:
            raise ValueError(
                "importance_cap bounds proximal / behaviour: set ratio=proximal with it, or take "
                "the objective tis"
            )
        return self


class Schedule(StrEnum):
    """How the learning rate goes on after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Ceiling(Section):
    """What a figure of an update may be at most."""

    warn: float | None = setting(
        None, "Above this, a warning; none is never.", unit="1", ge=0, le=1e9
    )
    stop: float | None = setting(
        None, "Above this, the run stops; none is never.", unit="1", ge=0, le=1e9
    )

    @model_validator(mode="after")
    def _in_order(self) -> Ceiling:
        if self.warn is not None and self.stop is not None and self.stop < self.warn:
            raise ValueError(f"stop ({self.stop:g}) is below warn ({self.warn:g})")
        return self


class Floor(Section):
    """What a figure of an update may be at least."""

    warn: float | None = setting(
        None, "Below this, a warning; none is never.", unit="1", ge=0, le=1e9
    )
    stop: float | None = setting(
        None, "Below this, the run stops; none is never.", unit="1", ge=0, le=1e9
    )

    @model_validator(mode="after")
    def _in_order(self) -> Floor:
        if self.warn is not None and self.stop is not None and self.stop > self.warn:
            raise ValueError(f"stop ({self.stop:g}) is above warn ({self.warn:g})")
        return self


class FreshGapCeiling(Ceiling):
    """In fp32 engine and trainer differ by about 1e-7; far above that, one of them is wrong."""

    warn: float | None = setting(
        0.05, "Above this, a warning; none is never.", unit="1", ge=0, le=1e9
    )


class ClipCeiling(Ceiling):
    """Above it hardly anything is trained."""

    warn: float | None = setting(
        0.9, "Above this, a warning; none is never.", unit="1", ge=0, le=1e9
    )


class SamplesFloor(Floor):
    """Below it few targets carry most of the weight."""

    warn: float | None = setting(
        0.2, "Below this, a warning; none is never.", unit="1", ge=0, le=1e9
    )


class HealthConfig(Section):
    """When the figures of an update warn or stop the run."""

    logprob_gap: Ceiling = setting(
        Ceiling(), "Mean over targets of |trainer's log-prob - recorded|."
    )
    logprob_gap_max: Ceiling = setting(Ceiling(), "The largest of these differences.")
    fresh_gap: FreshGapCeiling = setting(
        FreshGapCeiling(),
        "The mean gap of targets that the trained version itself sampled: engine against trainer.",
    )
    clip_fraction: ClipCeiling = setting(ClipCeiling(), "Share of ratios that are clipped.")
    effective_samples: SamplesFloor = setting(
        SamplesFloor(), "Share of the targets that they are worth by their importance weights."
    )
    entropy: Floor = setting(Floor(), "Mean entropy of the policy at its targets, in nats.")
    grad_norm: Ceiling = setting(
        Ceiling(), "Before clipping. A gradient that is not finite always warns, and is above."
    )
    groups_without_gradient: Ceiling = setting(
        Ceiling(), "Share of an update's groups that train nothing."
    )


class PackKind(StrEnum):
    """How samples lie in a micro-step."""

    TREE = "tree"
    FLAT = "flat"


class ShuffleKind(StrEnum):
    """In which order the groups of a step are shared out over its updates."""

    ARRIVAL = "arrival"
    WINDOW = "window"
    GLOBAL = "global"


class TrainingConfig(Section):
    """Updates and checkpoints."""

    steps: int = setting(6, "RL steps of the run.", unit="steps", ge=1, le=1_000_000)
    updates_per_step: int = setting(4, "Updates of a step.", unit="updates", ge=1, le=1024)
    learning_rate: float = setting(5e-4, "AdamW learning rate.", unit="1", gt=0, le=1)
    warmup_updates: int = setting(
        0, "Updates over which the rate rises from zero.", unit="updates", ge=0, le=1_000_000
    )
    schedule: Schedule = setting(
        Schedule.CONSTANT, "How the rate falls from the warm-up to the run's last update."
    )
    final_rate: float = setting(
        0.0, "Share of learning_rate that linear and cosine end at.", unit="1", ge=0, le=1
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
    shuffle: ShuffleKind = setting(
        ShuffleKind.ARRIVAL,
        "Groups get their update in the order in which they are sealed (arrival); or every "
        "shuffle_window of them are shuffled once they are there (window); or all of a step, so "
        "that training waits for its last group (global).",
    )
    shuffle_window: int = setting(
        8, "Groups of a window, with shuffle window.", unit="groups", ge=2, le=1_000_000
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
    health: HealthConfig = setting(HealthConfig(), "When an update warns or stops the run.")

    @model_validator(mode="after")
    def _checkpoint_inside_step(self) -> TrainingConfig:
        if self.checkpoint_every > self.updates_per_step:
            raise ValueError(
                f"checkpoint_every ({self.checkpoint_every}) is larger than updates_per_step "
                f"({self.updates_per_step}); a step always ends with a checkpoint"
            )
        return self

    @model_validator(mode="after")
    def _rate_falls(self) -> TrainingConfig:
        updates = self.steps * self.updates_per_step
        if self.schedule is Schedule.CONSTANT:
            if self.final_rate:
                raise ValueError("final_rate needs schedule=linear or cosine; constant ends at 1")
        elif self.warmup_updates >= updates:
            raise ValueError(
                f"warmup_updates ({self.warmup_updates}) leaves none of the run's {updates} "
                f"updates for schedule={self.schedule}"
            )
        return self


class StaleKind(StrEnum):
    """What is done about rollouts that would be too old when they are trained."""

    WAIT = "wait"
    DROP = "drop"


class StalenessConfig(Section):
    """How old a rollout may be when it is trained."""

    max: int = setting(
        8, "Largest version difference of a target token.", unit="updates", ge=0, le=1024
    )
    stale: StaleKind = setting(
        StaleKind.WAIT,
        "Where rollouts would be older than that (async: 2 x updates_per_step - 1 at most): wait "
        "begins them when the step before is trained; drop begins them beside it, and leaves out "
        "groups that are too old when their update trains. Each update counts those.",
    )
