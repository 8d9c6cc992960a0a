"""The stream over real replicas: Megatron processes that exchange through Mooncake."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from cells.replica.client import ReplicaCallError, ReplicaClient
from cells.replica.settings import ReplicaSettings
from configs.training import ObjectiveConfig
from storage.objects import Store
from tasks.training.anchors import Anchor
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.objectives import objective_path
from tasks.training.replica import ReplicaLostError
from tasks.training.stream import train_stream
from tests.tasks.training.fakes import LAYOUT, START, STEP, config, make_group

UNIFORM = -float(np.log(320))
"""About what a random policy gives to every token."""
GROUPS = 6


@pytest.fixture
def loop():
    """An event loop in a thread that outlives the replicas that are started on it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class LocalReplica:
    """A replica process of this test as a port, with a hook before and after each command."""

    def __init__(self, loop, store, log, name, *, core):
        self.name, self.core, self.loop = name, core, loop
        self.before = self.after = lambda command: None
        settings = ReplicaSettings(
            root=store.url,
            core=core,
            objective=objective_path("gspo"),
            objective_config=ObjectiveConfig(
                clip_low=0.5, clip_high=1.0, ratio="proximal", importance_cap=2, kl=0.1
            ),
        )
        self.client = self.wait(ReplicaClient.start(settings, log=log, limit_s=120), 130)

    def wait(self, work, limit_s):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit_s)

    def call(self, command, args, limit_s):
        self.before(command)
        try:
            answer = self.wait(self.client.call(command, args, limit_s), limit_s + 5)
        except ReplicaCallError as error:
            raise ReplicaLostError(str(error)) from error
        self.after(command)
        return answer

    def close(self):
        self.wait(self.client.close(), 20)


def train(store, members, start, first):
    """Train a step from the policy ``start``, with ``first`` as that of the run."""
    feed = GroupFeed()
    for number in range(GROUPS):
        feed.put(make_group(store, number, lengths=(20, 24), logprob=UNIFORM))
    feed.close()
    return train_stream(
        store=store,
        layout=LAYOUT,
        config=config(updates=3, budget=48),
        step=STEP,
        groups=GROUPS,
        feed=feed,
        members=lambda: members,
        spent=lambda: Spent(0.0, 0.0),
        anchors=lambda version: {
            "proximal": Anchor(start, version),
            "reference": Anchor(first, 0),
        },
    )


def weights(replica, folder):
    replica.call("export", {"path": str(folder)}, 60)
    parts = load_file(folder / "model.safetensors")
    return np.concatenate([parts[name].ravel() for name in sorted(parts)]).astype(np.float64)


@pytest.mark.real
def test_two_real_replicas_and_a_kill_train_the_same_weights_as_one(
    tmp_path, tiny_policy, other_policy, loop
):
    """With the loss that needs most: log-probs under the step's first weights and the run's."""
    streamed, alone = Store(tmp_path / "streamed"), Store(tmp_path / "alone")
    log = tmp_path / "replicas.log"
    replicas = [
        LocalReplica(loop, streamed, log, "a", core=True),
        LocalReplica(loop, streamed, log, "b", core=False),
        LocalReplica(loop, alone, log, "c", core=True),
    ]
    core, satellite, single = replicas
    try:
        for replica in replicas:
            replica.call("load", {"path": str(tiny_policy), "version": START}, 60)
        start = weights(core, tmp_path / "start")
        worked, done = threading.Event(), []

        def core_waits(command):
            """The core leaves work to the satellite until that has done its first micro-step."""
            if command == "micro_step":
                assert worked.wait(60)

        def satellite_dies_in_the_second_update(command):
            done.append(command)
            if command == "micro_step":
                worked.set()
                if "release" in done:
                    os.kill(satellite.client.pid, signal.SIGKILL)

        core.before = core_waits
        satellite.after = satellite_dies_in_the_second_update
        records = train(streamed, [core, satellite], tiny_policy, other_policy)
        assert "release" in done and not satellite.client.alive
        assert [record.policy_version for record in records] == [START + 1, START + 2, START + 3]
        assert all(record.grad_norm and record.kl > 0 for record in records)

        train(alone, [single], tiny_policy, other_policy)
        expected = weights(single, tmp_path / "single")
        found = weights(core, tmp_path / "streamed-weights")
        change = np.linalg.norm(expected - start)
        assert change > 0
        assert np.linalg.norm(found - expected) / change < 1e-3
        status = core.call("status", {}, 30)
        assert status["mooncake"]["read_bytes"] > 0
    finally:
        for replica in replicas:
            replica.close()
