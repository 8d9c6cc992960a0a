"""The commands of a replica: what each does to weights, gradient and optimizer."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from cells.replica.agreement import together
from cells.replica.anchors import Anchors
from cells.replica.buckets import Buckets
from cells.replica.errors import ReplicaError
from cells.replica.gradient import Answer, Gradient, UpdateKey, apply_gradient, recorded
from cells.replica.groups import GroupCache, SampleRequest, document
from cells.replica.objective import load_objective
from cells.replica.optimizer import Optimizer
from cells.replica.packing import in_rows
from cells.replica.passes import share_out
from cells.replica.place import Place
from cells.replica.policy import Policy
from cells.replica.requests import (
    Empty,
    LoadRequest,
    LogprobsRequest,
    MicroStepRequest,
    PathRequest,
    PullRequest,
    ReduceRequest,
    ShareRequest,
    StepRequest,
    UpdateRequest,
    block_of,
)
from cells.replica.settings import ReplicaSettings
from cells.replica.state import policy_folder, read_state, save_state
from cells.transfer.block import Block, Descriptor
from cells.transfer.endpoint import Endpoint
from cells.transfer.publication import Publication
from configs.field import Section
from storage.objects import Store
from storage.samples import Sample

_LOGPROB_ROW_TOKENS = 4096


class ReplicaState(StrEnum):
    """What a replica may be asked for."""

    EMPTY = "empty"
    AWAKE = "awake"
    ASLEEP = "asleep"


class Commands:
    """One replica, or one rank of it. Commands are carried out one at a time, in the order they
    come in; all ranks are given the same ones."""

    def __init__(self, settings: ReplicaSettings, place: Place | None = None) -> None:
        self.settings = settings
        self.place = place or Place(settings.layout)
        self.state = ReplicaState.EMPTY
        self._objective = load_objective(settings.objective, settings.objective_config)
        self._groups = GroupCache(Store(settings.root), settings.cached_groups)
        self._endpoint = Endpoint(settings.transfer_host)
        self._policy: Policy | None = None
        self._gradient: Gradient | None = None
        self._publication: Publication | None = None
        self._optimizer: Optimizer | None = None
        self._pulled: Descriptor | None = None
        self._buckets = Buckets()
        self._stepped: tuple[UpdateKey, Answer] | None = None
        self._table: dict[str, tuple[type[Section], Callable[[Any], Answer]]] = {
            "load": (LoadRequest, self._load),
            "micro_step": (MicroStepRequest, self._micro_step),
            "discard": (Empty, self._discard),
            "freeze": (UpdateRequest, self._freeze),
            "reduce": (ReduceRequest, self._reduce),
            "release": (UpdateRequest, self._release),
            "step": (StepRequest, self._step),
            "publish": (Empty, self._publish),
            "pull": (PullRequest, self._pull),
            "export": (PathRequest, self._export),
            "share": (ShareRequest, self._share),
            "unshare": (Empty, self._unshare),
            "save": (PathRequest, self._save),
            "restore": (PathRequest, self._restore),
            "logprobs": (LogprobsRequest, self._logprobs),
            "status": (Empty, self._status),
            "sleep": (Empty, self._sleep),
            "wake": (Empty, self._wake),
        }

    def run(self, command: str, args: dict[str, Any]) -> Answer:
        """Carry out a command and return its answer, JSON values only.

        Raises:
            ReplicaError: unknown, wrong arguments, or refused; nothing has changed.
            TransferError: a read failed; nothing has changed.
            DamagedError: the replica must end.
        """
        if command not in self._table:
            raise ReplicaError(f"unknown command {command!r}: one of {', '.join(self._table)}")
        kind, function = self._table[command]
        try:
            request = kind.model_validate(args)
        except ValidationError as error:
            raise ReplicaError(f"{command}: {error}") from error
        return function(request)

    def _load(self, request: LoadRequest) -> Answer:
        folder = Path(request.path)
        policy = self._policy_for(folder)
        with together(self.place):
            weights, policy.beside = policy.read(folder)
        self._forget()
        policy.commit(weights, request.version)
        self._renew(policy, weights)
        return {"version": policy.version}

    def _micro_step(self, request: MicroStepRequest) -> Answer:
        policy, gradient = self._loaded()
        if self.state is not ReplicaState.AWAKE:
            raise ReplicaError("the replica is asleep; wake it before a micro-step")
        samples = self._samples(request.samples, policy)
        key = UpdateKey(request.step, request.update)
        return gradient.accumulate(
            key, request.micro_step, samples, self._objective, request.anchors
        )

    def _discard(self, request: Empty) -> Answer:
        _, gradient = self._loaded()
        gradient.discard()
        return {}

    def _freeze(self, request: UpdateRequest) -> Answer:
        _, gradient = self._loaded()
        return gradient.freeze(request.update)

    def _reduce(self, request: ReduceRequest) -> Answer:
        _, gradient = self._loaded()
        self._core()
        key = UpdateKey(request.step, request.update)
        descriptor = block_of(request.descriptor, self.place)
        return gradient.reduce(key, descriptor, request.micro_steps, self.settings.transfer_limit_s)

    def _release(self, request: UpdateRequest) -> Answer:
        _, gradient = self._loaded()
        gradient.release(request.update)
        return {}

    def _step(self, request: StepRequest) -> Answer:
        policy, gradient = self._loaded()
        optimizer = self._core()
        key = UpdateKey(request.step, request.update)
        if gradient.key is None:
            if self._stepped is not None and key.fits(self._stepped[0]):
                return self._stepped[1]  # the answer was lost on its way
            raise ReplicaError(f"{key}: no micro-steps in the gradient")
        if not key.fits(gradient.key):
            raise ReplicaError(f"the gradient is of {gradient.key}, not of {key}")
        stepped = gradient.key
        norm = apply_gradient(
            policy,
            optimizer,
            executions=request.executions,
            rate=request.learning_rate,
            clip_norm=self.settings.clip_norm,
        )
        gradient.discard()
        answer = {"version": policy.version, "grad_norm": norm, "skipped": norm is None}
        self._stepped = (stepped, answer)
        return answer

    def _publish(self, request: Empty) -> Answer:
        policy, _ = self._loaded()
        self._core()
        assert self._publication is not None
        descriptor = self._publication.publish(policy.flat.weights, policy.version)
        return {"descriptor": descriptor.model_dump()}

    def _pull(self, request: PullRequest) -> Answer:
        policy, gradient = self._loaded()
        descriptor = block_of(request.descriptor, self.place)
        if gradient.key is not None:
            raise ReplicaError(
                f"the gradient of {gradient.key} belongs to the old weights; release or discard "
                f"it before a pull"
            )
        if descriptor == self._pulled and policy.version == descriptor.version:
            return {"version": policy.version, "bytes": 0, "seconds": 0.0}
        if descriptor.nbytes != policy.flat.weights.nbytes:
            raise ReplicaError(
                f"{descriptor.nbytes} bytes are published, this policy has "
                f"{policy.flat.weights.nbytes}"
            )
        began = time.monotonic()
        with together(self.place):
            payload = self._endpoint.read(descriptor, limit_s=self.settings.transfer_limit_s)
        self._forget()
        pulled = policy.flat.split(payload.view(policy.flat.weights.dtype))
        policy.commit(pulled, descriptor.version)
        self._renew(policy, pulled)
        self._pulled = descriptor
        seconds = time.monotonic() - began
        return {"version": policy.version, "bytes": descriptor.nbytes, "seconds": seconds}

    def _export(self, request: PathRequest) -> Answer:
        policy, _ = self._loaded()
        policy.export(Path(request.path))
        return {"version": policy.version}

    def _share(self, request: ShareRequest) -> Answer:
        policy, _ = self._loaded()
        return self._buckets.share(policy, request.first, request.limit_bytes)

    def _unshare(self, request: Empty) -> Answer:
        self._buckets.drop()
        return {}

    def _save(self, request: PathRequest) -> Answer:
        policy, _ = self._loaded()
        save_state(Path(request.path), policy, self._optimizer)
        return {"version": policy.version}

    def _restore(self, request: PathRequest) -> Answer:
        folder = Path(request.path)
        policy = self._policy_for(policy_folder(folder))
        with together(self.place):
            saved = read_state(folder, policy)
        self._forget()
        self._renew(policy, {})
        saved.apply(policy, self._optimizer)
        return {"version": policy.version}

    def _logprobs(self, request: LogprobsRequest) -> Answer:
        policy, _ = self._loaded()
        samples = [sample for _, sample in self._samples(request.samples, policy)]
        total, highest, tokens = 0.0, 0.0, 0
        for some in in_rows(samples, [len(sample.ids) for sample in samples], _LOGPROB_ROW_TOKENS):
            documents = [document(one) for one in some]
            shares = share_out(documents, self.place, prefixes=self.settings.share_prefixes)
            found = policy.passes.logprobs([share.row for share in shares])
            for share, logprobs in zip(shares, found or (), strict=found is not None):
                if share.samples:
                    behaviour = torch.cat([recorded(some[index]) for index in share.samples])
                    gap = (logprobs.double() - behaviour).abs()
                    total += float(gap.sum())
                    highest = max(highest, float(gap.max()))
                    tokens += len(gap)
        return {"gap_mean": total / max(tokens, 1), "gap_max": highest, "tokens": tokens}

    def _status(self, request: Empty) -> Answer:
        policy, gradient = self._policy, self._gradient
        empty = self.state is ReplicaState.EMPTY
        counters = self._endpoint.counters
        return {
            "state": self.state.value,
            "version": None if policy is None or empty else policy.version,
            "core": self.settings.core,
            "update": None if gradient is None or gradient.key is None else gradient.key.update,
            "micro_steps": [] if gradient is None else gradient.micro_steps,
            "frozen": gradient is not None and gradient.frozen is not None,
            "last_step": None if self._stepped is None else self._stepped[1],
            "incarnation": self._endpoint.incarnation,
            "mooncake": {
                "reads": counters.reads,
                "read_bytes": counters.read_bytes,
                "read_seconds": counters.read_seconds,
                "failures": counters.failures,
                "published_bytes": counters.published_bytes,
            },
        }

    def _sleep(self, request: Empty) -> Answer:
        _, gradient = self._loaded()
        gradient.discard()
        gradient.anchors.drop()
        self.state = ReplicaState.ASLEEP
        gc.collect()
        return {"state": self.state.value}

    def _wake(self, request: Empty) -> Answer:
        self._loaded()
        self.state = ReplicaState.AWAKE
        return {"state": self.state.value}

    def _policy_for(self, folder: Path) -> Policy:
        """The policy, made in the shape of ``folder`` the first time."""
        if self._policy is None:
            policy = Policy.open(folder, self.place)
            block = Block(policy.flat.gradients.nbytes)
            if policy.flat.gradients.device == block.memory.device:
                policy.flat.move_gradients(block.floats())
            self._endpoint.serve(block)
            if self.settings.core:
                self._publication = Publication(self._endpoint, policy.flat.weights.nbytes)
            self._gradient = Gradient(
                policy,
                block,
                self._endpoint,
                Anchors(policy),
                share_prefixes=self.settings.share_prefixes,
            )
            self._policy = policy
            # What is there now stays: the collection before a sleep need not walk through all of
            # torch and Megatron, which takes longer than everything else in a switch.
            gc.freeze()
        return self._policy

    def _renew(self, policy: Policy, weights: Mapping[str, Tensor]) -> None:
        """A fresh optimizer for the weights that have been taken, in a core."""
        if not self.settings.core:
            return
        self._optimizer = Optimizer(
            policy.flat,
            policy.shape,
            self.place,
            betas=(self.settings.beta1, self.settings.beta2),
            weight_decay=self.settings.weight_decay,
        )
        for name, weight in weights.items():  # as precise as they came
            self._optimizer.restore("weights", name, weight, 0.0)

    def _forget(self) -> None:
        """Drop everything that belongs to the weights that are about to be replaced."""
        assert self._gradient is not None
        self._gradient.discard()
        if self.state is ReplicaState.EMPTY:
            self.state = ReplicaState.AWAKE
        self._optimizer = None
        self._stepped = None
        self._pulled = None
        if self._publication is not None:
            self._publication.forget()

    def _loaded(self) -> tuple[Policy, Gradient]:
        if self._policy is None or self._gradient is None or self.state is ReplicaState.EMPTY:
            raise ReplicaError("no policy yet; load one first")
        return self._policy, self._gradient

    def _core(self) -> Optimizer:
        if self._optimizer is None:
            raise ReplicaError("this replica is a satellite; only the core does that")
        return self._optimizer

    def _samples(
        self, requests: tuple[SampleRequest, ...], policy: Policy
    ) -> list[tuple[SampleRequest, Sample]]:
        context = policy.shape.context
        return [(request, self._groups.sample(request, context)) for request in requests]
