"""Lines of the ledger of a step: everything that happens to its micro-steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from storage.records import Record


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class MicroStep(_Event):
    """Samples that one replica runs forward and backward at once."""

    id: str
    update: int
    samples: tuple[tuple[str, int], ...]
    """Query of the sealed group and index in it."""
    tokens: int
    targets: int


class Opened(_Event):
    """Training of the step begins on weights of this version."""

    event: Literal["opened"] = "opened"
    version: int


class Arrived(_Event):
    """A sealed group belongs to an update, for ever."""

    event: Literal["arrived"] = "arrived"
    group: str
    update: int


class Formed(_Event):
    """Samples are packed: ready."""

    event: Literal["formed"] = "formed"
    micro_steps: tuple[MicroStep, ...]


class Claimed(_Event):
    event: Literal["claimed"] = "claimed"
    micro_step: str
    replica: str


class Accumulated(_Event):
    """In the gradient of the replica that claimed it."""

    event: Literal["accumulated"] = "accumulated"
    micro_step: str
    replica: str
    stats: dict[str, float]


class Reduced(_Event):
    """What a replica accumulated is in the gradient of the core."""

    event: Literal["reduced"] = "reduced"
    replica: str


class Returned(_Event):
    """What a replica claimed or accumulated, and did not bring to the core, is ready again."""

    event: Literal["returned"] = "returned"
    replica: str
    reason: str


class Restarted(_Event):
    """The gradient of an update is lost with its core, or its weights are: all is ready again."""

    event: Literal["restarted"] = "restarted"
    update: int
    reason: str


class Stepping(_Event):
    """The core is told to step. Without a ``stepped`` after it, the core's version tells."""

    event: Literal["stepping"] = "stepping"
    update: int
    executions: int
    learning_rate: float


class Stepped(_Event):
    """The update is in the weights, or had nothing to train, or was not finite and is skipped."""

    event: Literal["stepped"] = "stepped"
    update: int
    version: int
    grad_norm: float | None
    seconds: float
    """From its first claim."""
    at: float


Event = Annotated[
    Opened
    | Arrived
    | Formed
    | Claimed
    | Accumulated
    | Reduced
    | Returned
    | Restarted
    | Stepping
    | Stepped,
    Field(discriminator="event"),
]


class LedgerLine(Record):
    """One line of the journal."""

    event: Event
