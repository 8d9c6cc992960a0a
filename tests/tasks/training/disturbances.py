"""A step that is trained while replicas come, go and are killed; and the same step undisturbed."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace

import numpy as np
from safetensors.numpy import load_file

from cells.checkpoint import latest_checkpoint, prune_checkpoints, save_checkpoint
from cells.client import DaemonError
from cells.transfer.block import Descriptor
from cells.transfer.endpoint import Endpoint
from storage.layout import RunLayout
from storage.objects import Store
from storage.run import Run
from tasks.training.anchors import Anchor
from tasks.training.exchange import CoreLostError
from tasks.training.feed import GroupFeed
from tasks.training.ledger import Ledger
from tasks.training.metrics import Spent
from tasks.training.replica import ReplicaLostError
from tasks.training.stream import train_stream
from tests.tasks.training.fakes import START, STEP, FlowKilledError, config, make_group

UPDATES = 3
UNIFORM = -float(np.log(320))
"""About what a random policy gives to every token."""
_ATTEMPTS = 20


@dataclass
class Kill:
    """SIGKILL to a replica, so long after its command of this number was sent."""

    replica: str
    command: int
    delay_s: float


@dataclass
class Plan:
    """Everything that chance decides of a run; the moments of kills also depend on the machine."""

    groups: list[tuple[int, ...]]
    """Lengths of the trajectories of each."""
    budget: int
    shuffle: str
    checkpoint_every: int
    arrive: float
    """Chance that a group is sealed between two looks at the replicas."""
    leave: float
    """Chance that a satellite leaves then."""
    come_back: float
    """Chance that one that left, or was killed, is there again."""
    kills: list[Kill]
    flow_dies_at: list[int]
    """Looks at which the process that trains is gone."""
    seed: int

    @classmethod
    def draw(cls, seed: int, kills: list[str]) -> Plan:
        chance = random.Random(seed)
        return cls(
            groups=[
                tuple(chance.choices(range(16, 40), k=chance.randint(1, 3)))
                for _ in range(chance.randint(UPDATES, 8))
            ],
            budget=chance.randint(48, 120),
            shuffle=chance.choice(["arrival", "window", "global"]),
            checkpoint_every=chance.randint(1, 2),
            arrive=chance.choice([0.2, 0.5, 1.0]),
            leave=chance.choice([0.0, 0.1, 0.3]),
            come_back=chance.choice([0.3, 0.7]),
            kills=[Kill(name, chance.randint(1, 12), chance.uniform(0, 0.06)) for name in kills],
            flow_dies_at=[chance.randint(2, 12)] if chance.random() < 0.4 else [],
            seed=seed,
        )


@dataclass
class Trained:
    """What is left of a step."""

    weights: np.ndarray
    gradients: dict[int, np.ndarray] = field(default_factory=dict)
    """Of each update, as the core steps with it."""
    order: list[str] = field(default_factory=list)
    """Groups in the order in which they got their updates."""
    died: list[str] = field(default_factory=list)
    """What was under way at each death: ``replica:command``."""
    by_satellites: int = 0
    """Micro-steps that satellites accumulated."""


class Bench:
    """Replica processes over one storage: a core, two satellites, and a core that works alone."""

    def __init__(self, make_replica, root, policy, first):
        self.root = root
        self.policy, self.first = policy, first
        self.core = make_replica("core", core=True)
        self.satellites = [make_replica(name, core=False) for name in ("left", "right")]
        self.single = make_replica("single", core=True)
        self._reader = Endpoint()

    def disturbed(self, plan: Plan) -> Trained:
        return _Disturbed(self, plan).train()

    def alone(self, plan: Plan, order: list[str]) -> Trained:
        """The same groups in the same order by one replica that nothing happens to."""
        run = self.run(f"alone-{plan.seed}", replace(plan, shuffle="arrival"))
        feed, found = GroupFeed(), Trained(np.zeros(0), order=order)
        for name in order:
            feed.put(name)
        feed.close()
        self.load(self.single)
        port = _Port(
            self.single, before=lambda command, args: self.keep(self.single, found, command, args)
        )
        self.stream(run, feed, len(order), lambda: [port])
        folder = run.store.local_path("exported")
        self.single.call("export", {"path": str(folder)}, 60)
        found.weights = weights_in(folder)
        return found

    def run(self, name: str, plan: Plan) -> Run:
        store, layout = Store(self.root), RunLayout(name)
        for number, lengths in enumerate(plan.groups):
            make_group(store, number, lengths=lengths, logprob=UNIFORM, layout=layout)
        settings = config(
            updates=UPDATES,
            budget=plan.budget,
            **{"training.shuffle": plan.shuffle, "training.shuffle_window": 3},
        )
        return Run(store, layout, settings, identity=name)

    def load(self, replica):
        replica.call("load", {"path": str(self.policy), "version": START}, 60)

    def stream(self, run, feed, groups, members, **more):
        return train_stream(
            store=run.store,
            layout=run.layout,
            config=run.config,
            step=STEP,
            groups=groups,
            feed=feed,
            members=members,
            spent=lambda: Spent(0.0, 0.0),
            anchors=lambda version: {
                "proximal": Anchor(self.policy, version),
                "reference": Anchor(self.first, 0),
            },
            **more,
        )

    def keep(self, core, found: Trained, command, args):
        """Read the gradient of the core, through Mooncake, before it steps with it."""
        if command != "step":
            return
        frozen = core.call("freeze", {"update": args["update"]}, 30)
        payload = self._reader.read(Descriptor(**frozen["descriptor"]), limit_s=30)
        values = payload.numpy().view(np.float32).astype(np.float64)
        found.gradients[args["update"]] = values

    def close(self):
        for replica in (self.core, *self.satellites, self.single):
            replica.close()


class _Port:
    """A replica as one attempt at a step sees it; useless to threads that outlive the attempt."""

    def __init__(self, replica, *, before=lambda command, args: None):
        self.name, self.core = replica.name, replica.core
        self.over = False
        self._replica, self._before = replica, before

    def call(self, command, args, limit_s):
        if self.over:
            raise ReplicaLostError(f"{self.name}: this attempt is over")
        self._before(command, args)
        return self._replica.call(command, args, limit_s)


class _Host:
    """What a checkpoint needs of a cell host."""

    def __init__(self, port):
        self._port, self.name = port, port.name

    def call(self, method, path, body=None, *, limit_s=60):
        try:
            if path == "/status":
                return {"replica": self._port.call("status", {}, limit_s)}
            return self._port.call(path.rsplit("/", 1)[-1], body["args"], limit_s)
        except ReplicaLostError as error:
            raise DaemonError(str(error)) from error


class _Disturbed:
    """One step with everything that a plan does to it."""

    def __init__(self, bench: Bench, plan: Plan):
        self.bench, self.plan = bench, plan
        self.chance = random.Random(plan.seed)
        self.run = bench.run(f"disturbed-{plan.seed}", plan)
        self.found = Trained(np.zeros(0))
        self.sent = dict.fromkeys(["core", "left", "right"], 0)
        self.kills = list(plan.kills)
        self.timers: list[threading.Timer] = []
        self.lock = threading.Lock()
        self.looks = 0
        self.sealed = [f"s{STEP:05d}-q{number:04d}" for number in range(len(plan.groups))]
        self.chance.shuffle(self.sealed)
        self.arrived: list[str] = []
        self.replicas = {one.name: one for one in (bench.core, *bench.satellites)}

    def train(self) -> Trained:
        bench = self.bench
        for replica in self.replicas.values():
            if not replica.alive:
                replica.start()
            bench.load(replica)
        for _ in range(_ATTEMPTS):
            try:
                self._attempt()
                break
            except (CoreLostError, ReplicaLostError, DaemonError, FlowKilledError):
                continue
        else:
            raise AssertionError(f"{_ATTEMPTS} attempts, no end: {self.found.died}")
        for timer in self.timers:
            timer.join()  # the replicas are used again
        checkpoint = latest_checkpoint(self.run)
        assert checkpoint is not None and checkpoint.manifest.update == UPDATES
        self.found.weights = weights_in(self.run.store.local_path(checkpoint.policy_key))
        ledger = Ledger(self.run.store, self.run.layout, STEP)
        self.found.order = list(ledger.groups())
        ledger.close()
        return self.found

    def _attempt(self):
        """What a flow does: restore the core if it is gone, train, save."""
        core = self.replicas["core"]
        if not core.alive:
            core.start()
            checkpoint = latest_checkpoint(self.run)
            if checkpoint is None:
                self.bench.load(core)
            else:
                state = self.run.store.local_path(checkpoint.state_key)
                core.call("restore", {"path": str(state)}, 60)
        ports = {name: self._port(one) for name, one in self.replicas.items()}
        present = {"core"}
        feed = GroupFeed()
        for name in self.arrived:
            feed.put(name)

        def members():
            self._look(feed, present)
            return [ports[name] for name in sorted(present)]

        def save(metrics):
            done = metrics.update + 1
            if done % self.plan.checkpoint_every == 0:
                self._save(ports["core"], done)

        try:
            groups = len(self.sealed)
            self.bench.stream(self.run, feed, groups, members, on_update=save)
            self._save(ports["core"], UPDATES)
        finally:
            for port in ports.values():
                port.over = True

    def _save(self, core, update):
        save_checkpoint(self.run, _Host(core), epoch=1, step=STEP, update=update)
        prune_checkpoints(self.run, keep=1)

    def _look(self, feed, present):
        self.looks += 1
        if self.looks in self.plan.flow_dies_at:
            self.found.died.append("flow")
            raise FlowKilledError
        waiting = self.sealed[len(self.arrived) :]
        if waiting and self.chance.random() < self.plan.arrive:
            self.arrived.append(waiting[0])
            feed.put(waiting[0])
        if len(self.arrived) == len(self.sealed):
            feed.close()
        for satellite in self.bench.satellites:
            name = satellite.name
            if name in present and (not satellite.alive or self.chance.random() < self.plan.leave):
                present.discard(name)
            elif name not in present and self.chance.random() < self.plan.come_back:
                if not satellite.alive:
                    satellite.start()
                    self.bench.load(satellite)
                present.add(name)

    def _port(self, replica):
        def before(command, args):
            with self.lock:
                self.sent[replica.name] += 1
                number = self.sent[replica.name]
                due = [k for k in self.kills if (k.replica, k.command) == (replica.name, number)]
            for kill in due:
                self.kills.remove(kill)
                self.found.died.append(f"{replica.name}:{command}")
                timer = threading.Timer(kill.delay_s, replica.kill)
                self.timers.append(timer)
                timer.start()
            if not replica.core and command == "micro_step":
                self.found.by_satellites += 1
            if replica.core:
                self.bench.keep(replica, self.found, command, args)

        return _Port(replica, before=before)


def weights_in(folder):
    """All weights of an HF directory in a row, in double precision."""
    parts = load_file(folder / "model.safetensors")
    return np.concatenate([parts[name].ravel() for name in sorted(parts)]).astype(np.float64)


def distance(found: Trained, expected: Trained, start: np.ndarray) -> tuple[float, float]:
    """Difference of the weights, divided by their change, and the largest of the gradients."""
    change = np.linalg.norm(expected.weights - start)
    assert change > 0 and set(found.gradients) == set(expected.gradients)
    gradients = [
        np.linalg.norm(found.gradients[one] - expected.gradients[one])
        / np.linalg.norm(expected.gradients[one])
        for one in expected.gradients
    ]
    return float(np.linalg.norm(found.weights - expected.weights) / change), float(max(gradients))
