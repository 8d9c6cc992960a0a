"""What a replica process is started with."""

from __future__ import annotations

from pydantic import model_validator

from configs.field import Section, setting
from configs.layout import LayoutConfig
from configs.training import ObjectiveConfig


class ReplicaSettings(Section):
    """Fixed for the life of the process."""

    root: str = setting(..., "Storage root that sample keys are relative to.", min_length=1)
    layout: LayoutConfig = setting(LayoutConfig(), "The ranks of the replica, one process each.")
    nodes: int = setting(
        1,
        "Machines that the ranks are on, in order and as many on each; rank 0 starts those of its "
        "own.",
        unit="machines",
        ge=1,
        le=65_536,
    )
    meeting: str = setting(
        "",
        "HOST:PORT of the leader's machine where the ranks of further machines join it.",
        pattern=r"^$|^\S+:\d{1,5}$",
        max_length=300,
    )
    ranks_limit_s: float = setting(
        300, "Longest wait of a rank for another one.", unit="seconds", gt=0, le=86_400
    )
    core: bool = setting(..., "Holds the optimizer: reduces, steps and publishes.")
    objective: str = setting(..., "Import path module:Class.", pattern=r"^[\w.]+:\w+$")
    objective_config: ObjectiveConfig = setting(ObjectiveConfig(), "What the class is made from.")
    beta1: float = setting(0.9, "AdamW beta 1.", unit="1", ge=0, lt=1)
    beta2: float = setting(0.95, "AdamW beta 2.", unit="1", ge=0, lt=1)
    weight_decay: float = setting(0.0, "Decoupled, of matrices only.", unit="1", ge=0, le=10)
    share_prefixes: bool = setting(
        False, "Compute a prefix that samples of a micro-step have in common once."
    )
    clip_norm: float = setting(1.0, "Global gradient norm.", unit="1", gt=0, le=1e6)
    transfer_host: str = setting("127.0.0.1", "Address that other replicas read from.")
    transfer_limit_s: float = setting(
        60, "Longest read of weights or a gradient.", unit="seconds", gt=0, le=3600
    )
    cached_groups: int = setting(
        64, "Sealed groups kept in memory.", unit="groups", ge=1, le=65_536
    )

    @property
    def node_ranks(self) -> int:
        """Ranks of each machine."""
        return self.layout.ranks // self.nodes

    @model_validator(mode="after")
    def _machines_fit(self) -> ReplicaSettings:
        if self.layout.ranks % self.nodes:
            raise ValueError(
                f"the layout's {self.layout.ranks} ranks can't be shared out evenly over "
                f"{self.nodes} machines"
            )
        if self.nodes > 1 and not self.meeting:
            raise ValueError(f"ranks on {self.nodes} machines need an address to meet at")
        return self
