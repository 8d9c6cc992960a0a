"""Replicas with exact arithmetic, sealed groups to train, and a world in which things die."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field

import numpy as np

from configs.load import load_config
from storage.layout import RunLayout, query_id
from storage.objects import Store
from storage.records import CallKind, Excluded, GroupHeader, Member, Scored
from storage.samples import Sample, SealedGroup, read_group, seal
from tasks.training.replica import ReplicaLostError

LAYOUT = RunLayout("r")
STEP = 0
WIDTH = 4
START = 5
"""Version at the step's start."""


class FlowKilledError(RuntimeError):
    """The process that trains is gone."""


def config(updates=2, budget=32, **more):
    settings = {
        "training.updates_per_step": updates,
        "training.micro_step_tokens": budget,
        "scoring.max_excluded_share": 0.5,
        **more,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load_config("quickstart", overrides, environment={})


def make_group(
    store,
    number,
    rewards=(0.0, 1.0),
    lengths=(8, 12),
    version=START,
    step=STEP,
    logprob=-1.0,
    layout=LAYOUT,
):
    """Seal a group; a reward of None is an excluded member. Returns its query id."""
    name = query_id(step, number)
    valid = [reward for reward in rewards if reward is not None]
    spread = len(set(valid)) > 1
    members, samples = [], []
    for index, reward in enumerate(rewards):
        execution = f"{name}-e{index:03d}"
        if reward is None:
            verdict = Excluded(reason="evaluator_failed", detail="")
        else:
            verdict = Scored(
                reward=reward, timed_out=index == 0, tests_passed=0, tests_total=1, log=""
            )
        votes = spread and reward is not None
        members.append(
            Member(
                execution_id=execution,
                verdict=verdict,
                advantage=1.0 if votes else None,
                paths=len(lengths),
                selected=len(lengths),
            )
        )
        for length in lengths if votes else ():
            targets = np.arange(length) >= length // 2
            samples.append(
                Sample(
                    execution_id=execution,
                    kind=CallKind.MAIN,
                    ids=(np.arange(length, dtype=np.int32) * (index + 3) + 17 * number + length)
                    % 300,
                    targets=targets,
                    logprobs=np.where(targets, logprob, 0.0).astype(np.float32),
                    versions=np.where(targets, version, -1).astype(np.int32),
                    advantage=1.0 if reward else -0.5,
                    weight=1 / len(lengths),
                )
            )
    header = GroupHeader(
        query_id=name,
        step=step,
        problem_id="p",
        sealed_at=0.0,
        members=tuple(members),
        spread=spread,
    )
    seal(store, layout.group(name), SealedGroup(header, tuple(samples)))
    return name


def sample_gradient(group_key, index, sample, weights):
    """Integers, so that sums are exact in any order; they depend on the weights."""
    base = np.array([ord(c) for c in group_key[-20:-12]], np.int64)[:WIDTH]
    return (base + 31 * index + sample.ids[:WIDTH]) * (weights % 1009 + 1)


@dataclass
class World:
    """Everything that outlives the process that trains: storage, replicas, what is published."""

    store: Store
    published: dict = field(default_factory=dict)
    frozen: dict = field(default_factory=dict)
    checkpoint: tuple = (START, np.arange(1, WIDTH + 1, dtype=np.int64) * 1000, None)
    deaths: list = field(default_factory=list)
    """[replica or None, command, when, times to spare]; each once. None kills who trains."""
    log: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def due(self, replica, command, when):
        with self.lock:
            for death in self.deaths:
                who, what, moment, left = death
                if (who in (replica, None)) and what in (command, "*") and moment == when:
                    if left > 0:
                        death[3] -= 1
                        continue
                    self.deaths.remove(death)
                    return "flow" if who is None else "replica"
        return None


class FakeReplica:
    """Follows the commands of a replica; its process can die before or after carrying one out, and
    its answer can get lost."""

    def __init__(self, world, name, core=False):
        self.world, self.name, self.core = world, name, core
        self.lock = threading.Lock()
        self.start()

    def start(self):
        """A new process: nothing that was in memory is left."""
        self.version, self.weights = -1, np.zeros(WIDTH, np.int64)
        self.last_step = None
        if self.core:
            self.version, self.weights, self.last_step = copy.deepcopy(self.world.checkpoint)
        self.empty()

    def empty(self):
        self.gradient, self.micro_steps = np.zeros(WIDTH, np.int64), []

    def call(self, command, args, limit_s):
        assert limit_s > 0
        with self.lock:
            self._maybe_die(command, "before")
            answer = getattr(self, command)(**args)
            self._maybe_die(command, "after")
            if self.world.due(self.name, command, "unheard"):
                raise ReplicaLostError(f"{self.name}: no answer to {command}")
        self.world.log.append((self.name, command, args))
        return answer

    def _maybe_die(self, command, when):
        victim = self.world.due(self.name, command, when)
        if victim == "flow":
            raise FlowKilledError(f"{command} {when}")
        if victim == "replica":
            self.start()
            raise ReplicaLostError(f"{self.name}: died {when} {command}")

    def status(self):
        return {
            "version": self.version,
            "micro_steps": list(self.micro_steps),
            "last_step": self.last_step,
        }

    def discard(self):
        self.empty()
        return {}

    def micro_step(self, step, update, micro_step, samples):
        targets = 0
        assert micro_step not in self.micro_steps
        for row in samples:
            sample = read_group(self.world.store, row["group_key"]).samples[row["index"]]
            self.gradient += sample_gradient(row["group_key"], row["index"], sample, self.weights)
            targets += int(sample.targets.sum())
        self.micro_steps.append(micro_step)
        return {
            "micro_step": micro_step,
            "samples": len(samples),
            "target_tokens": targets,
            "tokens": 0,
            "seconds": 0.0,
            "stats": {"clipped_sum": 1.0, "logprob_gap_sum": 0.25 * targets},
        }

    def publish(self):
        assert self.core
        self.world.published[self.version] = self.weights.copy()
        return {"descriptor": {"version": self.version}}

    def pull(self, descriptor):
        assert not self.core
        self.weights = self.world.published[descriptor["version"]].copy()
        self.version = descriptor["version"]
        return {"version": self.version}

    def freeze(self, update):
        self.world.frozen[self.name] = self.gradient.copy()
        return {"descriptor": {"name": self.name}, "micro_steps": list(self.micro_steps)}

    def reduce(self, step, update, descriptor, micro_steps):
        assert self.core
        if not set(micro_steps) <= set(self.micro_steps):
            self.gradient += self.world.frozen[descriptor["name"]]
            self.micro_steps += micro_steps
        return {}

    def release(self, update):
        self.empty()
        return {}

    def step(self, step, update, executions, learning_rate):
        self.weights = self.weights - self.gradient * executions
        self.version += 1
        self.empty()
        answer = {"version": self.version, "grad_norm": 2.0, "skipped": False}
        self.last_step = answer
        return answer


def one_shot(store, assignment, updates, start):
    """Weights after the updates, each trained at once by one loop over all of its samples."""
    weights = start.copy()
    for update in range(updates):
        total, voters = np.zeros(WIDTH, np.int64), 0
        for name in sorted(group for group, its in assignment.items() if its == update):
            key = LAYOUT.group(name)
            group = read_group(store, key)
            for index, sample in enumerate(group.samples):
                total += sample_gradient(key, index, sample, weights)
            voters += len({sample.execution_id for sample in group.samples})
        weights = weights - total * voters
    return weights
