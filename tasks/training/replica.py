"""Commands to a training replica, whoever carries them, and its checked answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cells.client import DaemonClient, DaemonError, FencedError
from configs.run import RunConfig
from storage.layout import RunLayout
from tasks.training.anchors import Anchor
from tasks.training.events import MicroStep

A = TypeVar("A", bound=BaseModel)


class ReplicaLostError(RuntimeError):
    """A replica is dead, refuses, answers nonsense or is too slow; the text says which and what.

    What it accumulated counts as gone."""


class ReplicaPort(Protocol):
    """A replica that commands can be sent to, from any thread, one at a time.

    Commands are carried out in the order in which they were sent, also when the sender no longer
    waits for an answer.
    """

    @property
    def name(self) -> str:
        """Of its cell; unique."""

    @property
    def core(self) -> bool:
        """Whether it holds the authoritative weights and the optimizer state."""

    def call(self, command: str, args: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Carry out a command.

        Raises:
            ReplicaLostError: dead, refused, or no answer within ``limit_s`` seconds.
        """


class HostReplica:
    """The replica of a cell, reached through its cell host."""

    def __init__(self, client: DaemonClient, *, name: str, core: bool, epoch: int) -> None:
        self._client = client
        self._name = name
        self._core = core
        self._epoch = epoch

    @property
    def name(self) -> str:
        return self._name

    @property
    def core(self) -> bool:
        return self._core

    def call(self, command: str, args: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """See ``ReplicaPort.call``.

        Raises:
            FencedError: a newer manager has taken over; training has to end.
        """
        body = {"epoch": self._epoch, "args": args}
        try:
            return self._client.call("POST", f"/replica/{command}", body, limit_s=limit_s)
        except FencedError:
            raise
        except DaemonError as error:
            raise ReplicaLostError(f"replica of cell {self._name}: {command}: {error}") from error


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StepAnswer(_Answer):
    """What an optimizer step did."""

    version: int
    grad_norm: float | None
    skipped: bool


class Status(_Answer):
    """Where a replica stands."""

    version: int
    micro_steps: tuple[str, ...]
    """In its gradient, those that it took from satellites included."""
    last_step: StepAnswer | None = None


class MicroAnswer(_Answer):
    """What a micro-step covered, and sums over its samples."""

    micro_step: str
    samples: int
    target_tokens: int
    stats: dict[str, float]
    seconds: float = 0.0


class Frozen(_Answer):
    """A satellite's gradient, kept until it is released."""

    descriptor: dict[str, Any]
    micro_steps: tuple[str, ...]


class _Descriptor(_Answer):
    descriptor: dict[str, Any]


class _Version(_Answer):
    version: int


@dataclass(frozen=True)
class Limits:
    """Longest times of commands, in seconds."""

    compute_s: float
    transfer_s: float

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        return cls(config.training.micro_step_limit_s, config.cells.switch_limit_s)


class Replica:
    """Typed commands over a port. Every method raises ``ReplicaLostError``.

    Args:
        anchors: the policies that the objective needs besides the trained one, by name.
    """

    def __init__(
        self,
        port: ReplicaPort,
        layout: RunLayout,
        limits: Limits,
        step: int,
        anchors: Mapping[str, Anchor] | None = None,
    ) -> None:
        self.name = port.name
        self.core = port.core
        self._port = port
        self._layout = layout
        self._limits = limits
        self._step = step
        self._anchors = anchors or {}

    def status(self) -> Status:
        return self._call("status", {}, self._limits.compute_s, Status)

    def discard(self) -> None:
        """Zero the gradient and forget what is in it."""
        self._call("discard", {}, self._limits.compute_s, _Answer)

    def micro_step(self, micro_step: MicroStep) -> MicroAnswer:
        """Add the gradient sums of its samples."""
        samples = [
            {"group_key": self._layout.group(group), "index": index}
            for group, index in micro_step.samples
        ]
        args = {
            "step": self._step,
            "update": micro_step.update,
            "micro_step": micro_step.id,
            "samples": samples,
        }
        if self._anchors:
            args["anchors"] = {name: one.argument() for name, one in self._anchors.items()}
        answer = self._call("micro_step", args, self._limits.compute_s, MicroAnswer)
        seen = (answer.micro_step, answer.samples, answer.target_tokens)
        if seen != (micro_step.id, len(samples), micro_step.targets):
            raise ReplicaLostError(
                f"{self.name}: micro-step {micro_step.id} of {len(samples)} samples and "
                f"{micro_step.targets} targets was answered with {seen}"
            )
        return answer

    def freeze(self, update: int) -> Frozen:
        return self._call("freeze", {"update": update}, self._limits.transfer_s, Frozen)

    def reduce(self, update: int, frozen: Frozen) -> None:
        args = {
            "step": self._step,
            "update": update,
            "descriptor": frozen.descriptor,
            "micro_steps": list(frozen.micro_steps),
        }
        self._call("reduce", args, self._limits.transfer_s, _Answer)

    def release(self, update: int) -> None:
        self._call("release", {"update": update}, self._limits.transfer_s, _Answer)

    def publish(self) -> dict[str, Any]:
        """Descriptor of the current weights."""
        return self._call("publish", {}, self._limits.transfer_s, _Descriptor).descriptor

    def pull(self, descriptor: Mapping[str, Any]) -> int:
        """Take the weights of the core; returns their version."""
        args = {"descriptor": dict(descriptor)}
        return self._call("pull", args, self._limits.transfer_s, _Version).version

    def step(self, update: int, executions: int, learning_rate: float) -> StepAnswer:
        args = {
            "step": self._step,
            "update": update,
            "executions": executions,
            "learning_rate": learning_rate,
        }
        return self._call("step", args, self._limits.compute_s, StepAnswer)

    def _call(self, command: str, args: dict[str, Any], limit_s: float, kind: type[A]) -> A:
        try:
            return kind.model_validate(self._port.call(command, args, limit_s))
        except ValidationError as error:
            raise ReplicaLostError(f"{self.name}: answer to {command}: {error}") from error
