"""The one model of a run's settings."""

from __future__ import annotations

from pydantic import model_validator

from configs.cells import (
    CellsConfig,
    DebugConfig,
    GatewayConfig,
    PolicyName,
    PrefectConfig,
    StorageConfig,
)
from configs.field import Section, setting
from configs.model import ModelConfig, WarmStartConfig
from configs.problems import (
    EvaluationConfig,
    HarnessConfig,
    ProblemsConfig,
    RolloutConfig,
    ScoringConfig,
)
from configs.tls import TlsConfig
from configs.tracking import TrackingConfig
from configs.training import ShuffleKind, StalenessConfig, TrainingConfig, TrajectoryConfig


class RunConfig(Section):
    """Everything that decides what a run does. Frozen; unknown keys are refused."""

    name: str = setting(
        "quickstart", "Name of the configuration.", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$"
    )
    seed: int = setting(1, "Seed of the run.", unit="1", ge=0, le=2**31 - 1)
    model: ModelConfig = setting(ModelConfig(), "The policy.")
    warm_start: WarmStartConfig = setting(WarmStartConfig(), "How the first policy is fitted.")
    problems: ProblemsConfig = setting(ProblemsConfig(), "The problems.")
    harness: HarnessConfig = setting(HarnessConfig(), "The agent program.")
    rollout: RolloutConfig = setting(RolloutConfig(), "The executions.")
    scoring: ScoringConfig = setting(ScoringConfig(), "The verdicts.")
    trajectory: TrajectoryConfig = setting(TrajectoryConfig(), "The trajectories.")
    training: TrainingConfig = setting(TrainingConfig(), "The updates.")
    staleness: StalenessConfig = setting(StalenessConfig(), "The bound on staleness.")
    evaluation: EvaluationConfig = setting(EvaluationConfig(), "The held-out evaluation.")
    cells: CellsConfig = setting(CellsConfig(), "The cells.")
    gateway: GatewayConfig = setting(GatewayConfig(), "The gateway.")
    tls: TlsConfig = setting(TlsConfig(), "The encryption between machines.")
    storage: StorageConfig = setting(StorageConfig(), "The storage.")
    tracking: TrackingConfig = setting(TrackingConfig(), "Trackers of experiments.")
    prefect: PrefectConfig = setting(PrefectConfig(), "The orchestration server.")
    debug: DebugConfig = setting(DebugConfig(), "Switches for experiments.")

    @model_validator(mode="after")
    def _parts_agree(self) -> RunConfig:
        if not self.problems.trainable:
            raise ValueError(
                f"problems.source {self.problems.source} is marked held_out, so that there is "
                f"nothing to train on: take the mark away, or make it a part of a mixture with a "
                f"source that may be trained on"
            )
        longest = self.harness.context_budget + self.harness.max_tokens
        if longest > self.model.context:
            raise ValueError(
                f"harness.context_budget + harness.max_tokens ({longest}) exceed model.context "
                f"({self.model.context}): the last call before a compaction would not fit"
            )
        if self.rollout.queries < self.training.updates_per_step:
            raise ValueError(
                f"rollout.queries ({self.rollout.queries}) is smaller than "
                f"training.updates_per_step ({self.training.updates_per_step}): an update needs at "
                f"least one group"
            )
        if self.scoring.min_valid > self.rollout.group_size:
            raise ValueError(
                f"scoring.min_valid ({self.scoring.min_valid}) exceeds rollout.group_size "
                f"({self.rollout.group_size}): every group would be dropped"
            )
        oldest = self.training.updates_per_step - 1
        if oldest > self.staleness.max:
            raise ValueError(
                f"training.updates_per_step ({self.training.updates_per_step}) makes the last "
                f"update of a step train tokens that are {oldest} updates old, more than "
                f"staleness.max ({self.staleness.max}) allows"
            )
        if self.cells.policy is PolicyName.ADAPTIVE:
            self._may_carry()
        if self.model.context > self.cells.kv_tokens:
            raise ValueError(
                f"model.context ({self.model.context}) exceeds cells.kv_tokens "
                f"({self.cells.kv_tokens})"
            )
        return self

    def _may_carry(self) -> None:
        queries, updates = self.rollout.queries, self.training.updates_per_step
        if queries % updates:
            raise ValueError(
                f"cells.policy=adaptive counts groups by the update: rollout.queries ({queries}) "
                f"must be a multiple of training.updates_per_step ({updates})"
            )
        if self.training.shuffle is not ShuffleKind.ARRIVAL:
            raise ValueError(
                f"cells.policy=adaptive trains the oldest groups first: training.shuffle must be "
                f"{ShuffleKind.ARRIVAL}, got {self.training.shuffle}"
            )
