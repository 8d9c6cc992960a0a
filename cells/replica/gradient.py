"""Gradient sums of an update: what is in them, exactly once, and how they travel."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cells.replica.agreement import together
from cells.replica.anchors import Anchors
from cells.replica.errors import DamagedError, ReplicaError
from cells.replica.groups import SampleRequest, document
from cells.replica.objective import Objective, Targets
from cells.replica.optimizer import Optimizer, finish, gradient_norm
from cells.replica.passes import BackwardError, Share, share_out
from cells.replica.policy import Policy
from cells.replica.requests import AnchorRequest
from cells.transfer.block import Block, Descriptor
from cells.transfer.endpoint import Endpoint
from storage.samples import Sample

Answer = dict[str, Any]


@dataclass(frozen=True)
class UpdateKey:
    """Which update of which step; a command that does not name the step goes with any."""

    step: int | None
    update: int

    def fits(self, other: UpdateKey | None) -> bool:
        """Whether both can mean the same update."""
        if other is None or self.update != other.update:
            return False
        return self.step is None or other.step is None or self.step == other.step

    def __str__(self) -> str:
        return f"update {self.update}" + ("" if self.step is None else f" of step {self.step}")


@dataclass
class Frozen:
    """A gradient that others may be reading."""

    update: int
    descriptor: Descriptor


@dataclass
class Gradient:
    """The gradient buffer of a policy and the micro-steps in it.

    A micro-step is in it wholly or not at all. Where a backward pass dies in the middle, all of
    the gradient is dropped, since nothing tells what part was added.
    """

    policy: Policy
    block: Block
    """What others read: the buffer itself, or its copy where the buffer is not in main memory."""
    endpoint: Endpoint
    anchors: Anchors
    share_prefixes: bool = False
    key: UpdateKey | None = None
    answers: dict[str, Answer | None] = field(default_factory=dict)
    """Of the micro-steps in the buffer; None for those that came from another replica."""
    frozen: Frozen | None = None

    @property
    def micro_steps(self) -> list[str]:
        return list(self.answers)

    def discard(self) -> None:
        """Zero the buffer and forget what was in it."""
        self.block.open()
        self.policy.flat.zero_gradients()
        self.key = None
        self.answers.clear()
        self.frozen = None

    def accumulate(
        self,
        key: UpdateKey,
        micro_step: str,
        samples: Sequence[tuple[SampleRequest, Sample]],
        objective: Objective,
        wanted: AnchorRequest,
    ) -> Answer:
        """Add the gradient of the sum over samples of scale * weight * loss.

        The same micro-step again is answered from memory.

        Raises:
            ReplicaError: the gradient belongs to another update or is frozen, or an anchor can't
                be read; or the backward pass failed, then the gradient was dropped.
        """
        known = self.answers.get(micro_step)
        if known is not None and key.fits(self.key):
            return known
        self._expect(key)
        if micro_step in self.answers:
            raise ReplicaError(f"micro-step {micro_step} came from another replica already")
        if self.frozen is not None:
            raise ReplicaError(f"the gradient of {self.key} is frozen; release it first")
        began = time.monotonic()
        place = self.policy.place
        documents = [document(sample) for _, sample in samples]
        shares = share_out(documents, place, prefixes=self.share_prefixes)
        rows = [share.row for share in shares]
        still = self.anchors.logprobs(wanted, rows)
        stats: defaultdict[str, float] = defaultdict(float)

        def loss(number: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
            others = {
                name: logprobs.detach() if of is None else of[number] for name, of in still.items()
            }
            mine = [samples[index] for index in shares[number].samples]
            stats["entropy_sum"] += float(entropies.double().sum()) if mine else 0.0
            return self._loss(shares[number], mine, logprobs, others, objective, stats)

        try:
            self.policy.passes.backward(rows, loss)
        except Exception as error:
            if not place.alone:
                raise DamagedError(
                    f"micro-step {micro_step} failed, other ranks wait: {error}"
                ) from error
            if isinstance(error, BackwardError):  # whatever it was, nothing tells how far it came
                self.discard()
                raise ReplicaError(f"backward failed, the gradient was dropped: {error}") from error
            raise
        own = [share for share in shares if share.samples]
        stats["computed_tokens_sum"] = sum(len(share.row.ids) for share in own)
        answer: Answer = {
            "micro_step": micro_step,
            "tokens": sum(len(share.row.ids) for share in own),
            "target_tokens": sum(len(share.row.labels) for share in own),
            "samples": sum(len(share.samples) for share in own),
            "seconds": time.monotonic() - began,
            "stats": _finite(stats),
        }
        self._take(key)
        self.answers[micro_step] = answer
        return answer

    def _loss(
        self,
        share: Share,
        samples: Sequence[tuple[SampleRequest, Sample]],
        found: Tensor,
        still: Mapping[str, Tensor],
        objective: Objective,
        stats: defaultdict[str, float],
    ) -> Tensor:
        """The sum of a row's losses, and what it tells added to ``stats``."""
        if not samples:
            return 0 * found.sum()  # all ranks run as many rows
        counts = share.row.target_counts
        logprobs = found.double().split(counts)
        anchors = {name: other.double().split(counts) for name, other in still.items()}
        total = torch.zeros((), dtype=torch.float64)
        for number, (request, sample) in enumerate(samples):
            own, behaviour = logprobs[number], recorded(sample)
            others = {name: parts[number] for name, parts in anchors.items()}
            loss, observed = objective(Targets(own, behaviour, sample.advantage, **others))
            total = total + request.scale * sample.weight * loss
            for name, value in observed.items():
                stats[f"{name}_sum"] += value
            _observe(stats, own.detach() - behaviour, sample, self.policy.version)
        stats["loss_sum"] += float(total.detach())
        return total

    def freeze(self, update: int) -> Answer:
        """Keep the gradient as it is and describe it to the core; again gives the same answer."""
        if self.frozen is None:
            if self.key is not None and self.key.update != update:
                raise ReplicaError(f"the gradient is of {self.key}, not of update {update}")
            if self.policy.flat.gradients.device != self.block.memory.device:
                self.block.floats().copy_(self.policy.flat.gradients)
            descriptor = self.endpoint.publish(self.block, self.policy.version)
            self.frozen = Frozen(update, descriptor)
        elif self.frozen.update != update:
            raise ReplicaError(f"the gradient of update {self.frozen.update} is frozen")
        descriptor = self.frozen.descriptor
        return {"descriptor": descriptor.model_dump(), "micro_steps": self.micro_steps}

    def release(self, update: int) -> None:
        """The core has it: zero the buffer. Again, or for an update that is gone, does nothing."""
        if self.frozen is not None and self.frozen.update == update:
            self.discard()

    def reduce(
        self, key: UpdateKey, descriptor: Descriptor, micro_steps: Sequence[str], limit_s: float
    ) -> Answer:
        """Add another replica's gradient, whole and verified; again does nothing.

        Raises:
            ReplicaError: it is of other weights or of another size, or shares some micro-steps
                with this gradient.
            TransferError: it can't be read or verified; nothing was added.
        """
        began = time.monotonic()
        present = [name for name in micro_steps if name in self.answers]
        if key.fits(self.key) and len(present) == len(micro_steps):
            return {"bytes": 0, "seconds": 0.0, "micro_steps": list(micro_steps)}
        self._expect(key)
        if present:
            raise ReplicaError(f"micro-steps {present} are in the gradient already, others are not")
        if descriptor.version != self.policy.version:
            raise ReplicaError(
                f"the gradient is of version {descriptor.version}, the weights here are version "
                f"{self.policy.version}"
            )
        if descriptor.nbytes != self.block.nbytes:
            raise ReplicaError(
                f"the gradient has {descriptor.nbytes} bytes, expected {self.block.nbytes}"
            )
        with together(self.policy.place):
            payload = self.endpoint.read(descriptor, limit_s=limit_s)
        gradients = self.policy.flat.gradients
        gradients.add_(payload.view(torch.float32).to(gradients.device))
        self._take(key)
        self.answers.update(dict.fromkeys(micro_steps))
        return {
            "bytes": descriptor.nbytes,
            "seconds": time.monotonic() - began,
            "micro_steps": list(micro_steps),
        }

    def _expect(self, key: UpdateKey) -> None:
        if self.key is not None and not key.fits(self.key):
            raise ReplicaError(
                f"the gradient is of {self.key}; step, release or discard it before {key}"
            )

    def _take(self, key: UpdateKey) -> None:
        if self.key is None or self.key.step is None:
            self.key = key


def apply_gradient(
    policy: Policy, optimizer: Optimizer, *, executions: int, rate: float, clip_norm: float
) -> float | None:
    """Divide the gradient sums by ``executions``, clip their global norm, and step.

    Returns:
        The norm before clipping, or None when it is not finite: then nothing was changed.

    Raises:
        DamagedError: the optimizer failed.
    """
    gradients = policy.flat.gradients
    finish(policy.flat, policy.shape, policy.place)
    gradients.div_(executions)
    norm = gradient_norm(policy.flat, policy.shape, policy.place)
    if not math.isfinite(norm):
        return None
    if norm > clip_norm:
        gradients.mul_(clip_norm / norm)
    try:
        optimizer.step(rate)
    except RuntimeError as error:
        raise DamagedError(f"the optimizer failed within a step: {error}") from error
    policy.version += 1
    return norm


def recorded(sample: Sample) -> Tensor:
    """Behaviour log-probabilities of a sample's own targets, float64 [targets]."""
    return torch.from_numpy(sample.logprobs[sample.targets]).double()


def _finite(stats: dict[str, float]) -> dict[str, float]:
    """What JSON can carry; ``not_finite`` counts what it can't."""
    finite = {name: value for name, value in stats.items() if math.isfinite(value)}
    return {**finite, "not_finite": float(len(stats) - len(finite))}


def _observe(stats: dict[str, float], gap: Tensor, sample: Sample, version: int) -> None:
    """Add what one sample tells about the distance to the policy that sampled it."""
    distance = gap.abs()
    stats["logprob_gap_sum"] += float(distance.sum())
    stats["logprob_gap_max"] = max(stats["logprob_gap_max"], float(distance.max()))
    versions = sample.versions[sample.targets]
    for sampler in np.unique(versions).tolist():
        of = torch.from_numpy(versions == sampler)
        stats[f"logprob_gap_sum@{sampler}"] += float(distance[of].sum())
        stats[f"targets@{sampler}"] += int(of.sum())
    weights = gap.exp()
    stats["importance_sum"] += float(weights.sum())
    stats["importance_square_sum"] += float(weights.square().sum())
    ages = version - versions
    stats["staleness_sum"] += float(ages.sum())
    stats["staleness_max"] = max(stats["staleness_max"], float(ages.max()))
    stats["targets"] += len(gap)
