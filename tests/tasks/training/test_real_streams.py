"""The stream over real replicas: Megatron processes that exchange through Mooncake."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from storage.objects import Store
from tasks.training.anchors import Anchor
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.stream import train_stream
from tests.tasks.training.disturbances import UNIFORM, weights_in
from tests.tasks.training.fakes import LAYOUT, START, STEP, config, make_group
from tests.tasks.training.processes import EventLoop, Replica

GROUPS = 6


@pytest.fixture
def loop():
    with EventLoop() as loop:
        yield loop


class Hooked(Replica):
    """A replica with a hook before and after each command."""

    before = after = staticmethod(lambda command: None)

    def call(self, command, args, limit_s):
        self.before(command)
        answer = super().call(command, args, limit_s)
        self.after(command)
        return answer


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
    return weights_in(folder)


@pytest.mark.real
def test_two_real_replicas_and_a_kill_train_the_same_weights_as_one(
    tmp_path, tiny_policy, other_policy, loop
):
    """With the loss that needs most: log-probs under the step's first weights and the run's."""
    streamed, alone = Store(tmp_path / "streamed"), Store(tmp_path / "alone")
    log = tmp_path / "replicas.log"
    replicas = [
        Hooked(loop, streamed.url, log, "a", core=True),
        Hooked(loop, streamed.url, log, "b", core=False),
        Hooked(loop, alone.url, log, "c", core=True),
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
                    satellite.kill()

        core.before = core_waits
        satellite.after = satellite_dies_in_the_second_update
        records = train(streamed, [core, satellite], tiny_policy, other_policy)
        assert "release" in done and not satellite.alive
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
