"""What is simulated: durations, calls, serving, training and cells, each with unit and source.

A workload is a YAML file. Beside its values it names under `sources`, for every single parameter,
where the value comes from; the count of fitted parameters is read off there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Origin(StrEnum):
    """Where the value of a parameter comes from."""

    PUBLISHED = "published"
    MEASURED = "measured"
    FITTED = "fitted"
    CHOSEN = "chosen"
    """Assumed, but settled among plausible values while the published gains were in view."""
    ASSUMED = "assumed"


class Source(BaseModel):
    """The origin of a value and one sentence of evidence."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origin: Origin
    note: str


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LognormalDurations(_Part):
    """Nominal durations: a lognormal of a query's share and an execution's own share.

    Nominal means tool time plus serving time at `ServingModel.nominal_requests` on a cell. The
    overall timeout cuts the nominal duration, so that neither waiting nor a crowded cell changes
    what an execution produces, and every policy trains exactly the same tokens.
    """

    kind: Literal["lognormal"] = "lognormal"
    median_s: PositiveFloat = Field(description="median of all executions, seconds")
    sigma_query: NonNegative = Field(description="standard deviation between queries, log seconds")
    sigma_execution: NonNegative = Field(description="deviation inside a query, log seconds")
    hung_share: Share = Field(0.0, description="share of executions that run into the timeout")


class RecordedDurations(_Part):
    """Measured durations: a query draws a problem, its executions draw from that one's list."""

    kind: Literal["recorded"] = "recorded"
    seconds: dict[str, tuple[PositiveFloat, ...]] = Field(
        description="seconds of each recorded execution, by problem"
    )

    @model_validator(mode="after")
    def _not_empty(self) -> RecordedDurations:
        if not self.seconds or not all(self.seconds.values()):
            raise ValueError("recorded durations need at least one execution for every problem")
        return self


class ReplayedExecution(_Part):
    """An execution as it was recorded: for each call its new prompt tokens, its output tokens and
    the seconds until the next, which its tools took. The first has no tokens: it is the start."""

    calls: tuple[tuple[NonNegative, NonNegative, NonNegative], ...]
    timed_out: bool = False


class ReplayedExecutions(_Part):
    """A recorded run again: the same executions in the same order, whatever the seed."""

    kind: Literal["replayed"] = "replayed"
    queries: Annotated[tuple[tuple[ReplayedExecution, ...], ...], Field(min_length=1)] = Field(
        description="the executions of each query, in the order in which they were launched"
    )


class ExecutionModel(_Part):
    """How a duration is made of model calls and tools."""

    timeout_s: PositiveFloat = Field(description="overall timeout on the nominal clock, seconds")
    block_s: PositiveFloat = Field(description="nominal seconds of one call and the tools after it")
    tool_share: Share = Field(description="share of the nominal duration spent in tools")
    prompt_per_output: NonNegative = Field(description="new prompt tokens per output token")
    first_prompt_tokens: NonNegative = Field(description="tokens of the first prompt")


class ServingModel(_Part):
    """A cell in rollout: requests share it; one alone decodes fastest."""

    decode_tokens_per_s: PositiveFloat = Field(description="output tokens/s of a request alone")
    half_concurrency: PositiveFloat = Field(
        description="requests beyond the first at which each decodes at half of that speed"
    )
    prefill_tokens_per_s: PositiveFloat = Field(description="prompt tokens/s of a request alone")
    kv_kept_on_reroute: Share = Field(description="share of the prefix not recomputed on a reroute")
    nominal_requests: Annotated[float, Field(ge=1)] = Field(
        description="concurrent requests on a cell at which the durations hold"
    )

    def speed(self, requests: float) -> float:
        """Output tokens per second of each of `requests` concurrent requests."""
        return self.decode_tokens_per_s / (1.0 + (requests - 1) / self.half_concurrency)

    def work(self, prompt_tokens: float, output_tokens: float) -> float:
        """A call in output tokens, its prefill converted at the ratio of the two speeds."""
        return output_tokens + prompt_tokens * self.decode_tokens_per_s / self.prefill_tokens_per_s


class TrainingModel(_Part):
    """A replica: forward and backward of micro-steps, then one optimizer step an update."""

    tokens_per_s: PositiveFloat = Field(description="tokens/s of one cell, forward and backward")
    micro_steps_per_group: PositiveInt = Field(description="micro-steps that a group is packed to")
    update_s: NonNegative = Field(description="reduce, optimizer step and publication, seconds")
    pull_s: NonNegative = Field(description="a cell's pull of a new version, seconds")


class CellModel(_Part):
    """The cells, and what their switches cost."""

    count: PositiveInt = Field(description="cells, the core among them")
    capacity: PositiveInt = Field(description="executions that a cell serves at once")
    async_training_cells: PositiveInt = Field(description="cells on which Async trains")
    to_training_s: NonNegative = Field(description="switch from rollout to training, seconds")
    to_rollout_s: NonNegative = Field(description="switch from training to rollout, seconds")
    decide_every_s: PositiveFloat = Field(description="least time between two decisions, seconds")


class OverheadModel(_Part):
    """What a step takes beside rollouts, training and switches."""

    launch_s: NonNegative = Field(
        description="from what a step had to wait for to its first execution, seconds"
    )
    start_s: NonNegative = Field(description="between the starts of two executions, seconds")
    seal_s: NonNegative = Field(
        description="from the end of a group's last execution to its micro-steps, seconds"
    )


class AsyncLaunch(StrEnum):
    """When a policy with a lag launches the next queries."""

    WINDOW = "window"
    """Query by query, as many as give the mean staleness of the bursts."""
    STEPS = "steps"
    """Step by step, while the step before is trained."""
    BURSTS = "bursts"
    """Step by step, when the step before is trained: no overlap, as the policies without a lag."""


class BatchModel(_Part):
    """How many executions become how many updates."""

    updates: PositiveInt = Field(description="updates of the whole run")
    updates_per_burst: PositiveInt = Field(description="updates on rollouts of one version")
    queries_per_update: PositiveInt = Field(description="groups that one update averages over")
    executions_per_query: PositiveInt = Field(description="executions in a group")
    async_launch: AsyncLaunch = Field(description="when Async launches the next queries")

    @model_validator(mode="after")
    def _whole_bursts(self) -> BatchModel:
        if self.updates % self.updates_per_burst:
            raise ValueError("updates must be a multiple of updates_per_burst")
        return self

    @property
    def queries(self) -> int:
        """Queries of the whole run."""
        return self.updates * self.queries_per_update

    @property
    def mean_staleness(self) -> float:
        """(0 + 1 + ... + n - 1)/n of a burst of n updates, in updates."""
        return (self.updates_per_burst - 1) / 2


class Workload(_Part):
    """Everything that one simulation needs beside the policy and the seed."""

    name: str
    durations: LognormalDurations | RecordedDurations | ReplayedExecutions = Field(
        discriminator="kind"
    )
    execution: ExecutionModel
    serving: ServingModel
    training: TrainingModel
    cells: CellModel
    batch: BatchModel
    overhead: OverheadModel | None = None
    """None: nothing else takes time."""
    sources: dict[str, Source]

    @model_validator(mode="after")
    def _every_parameter_has_a_source(self) -> Workload:
        names = set(self.parameters())
        if missing := sorted(names - set(self.sources)):
            raise ValueError(f"no source for {', '.join(missing)}")
        if unknown := sorted(set(self.sources) - names):
            raise ValueError(f"sources of parameters that do not exist: {', '.join(unknown)}")
        return self

    def parameters(self) -> dict[str, Any]:
        """Every parameter by its dotted name; recorded executions count as one."""
        parts: dict[str, _Part] = {
            "execution": self.execution,
            "serving": self.serving,
            "training": self.training,
            "cells": self.cells,
            "batch": self.batch,
        }
        if isinstance(self.durations, LognormalDurations):
            parts["durations"] = self.durations
        if self.overhead is not None:
            parts["overhead"] = self.overhead
        found = {
            f"{part}.{name}": getattr(model, name)
            for part, model in parts.items()
            for name in type(model).model_fields
            if name != "kind"
        }
        if isinstance(self.durations, RecordedDurations):
            found["durations.seconds"] = self.durations.seconds
        if isinstance(self.durations, ReplayedExecutions):
            found["durations.queries"] = self.durations.queries
        return found

    def of_origin(self, origin: Origin) -> tuple[str, ...]:
        """Names of the parameters whose value comes from there."""
        return tuple(sorted(n for n, s in self.sources.items() if s.origin is origin))

    def with_values(self, values: Mapping[str, Any], source: Source) -> Workload:
        """A copy with other values, by dotted name, and their source.

        Raises:
            ValueError: for a parameter that does not exist.
            pydantic.ValidationError: for a value that is not allowed.
        """
        data = self.model_dump()
        for name, value in values.items():
            if name not in self.sources:
                raise ValueError(f"no parameter {name!r}; there are {', '.join(self.sources)}")
            part, _, field = name.partition(".")
            data[part][field] = value
            data["sources"][name] = source.model_dump()
        return Workload.model_validate(data)


def load_workload(path: Path) -> Workload:
    """Read a workload file.

    Raises:
        OSError: if it cannot be read.
        pydantic.ValidationError: if a value, or the source of one, is missing or wrong.
    """
    return Workload.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
