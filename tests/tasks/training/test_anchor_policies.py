"""Which policies a step names to its replicas, and where they lie."""

from __future__ import annotations

import pytest

from cells.checkpoint import CheckpointError
from configs.load import load_config
from storage.layout import policy_prefix
from storage.objects import Store
from storage.records import CheckpointManifest
from storage.run import create_run
from tasks.training.anchors import Anchor, anchors_of
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.stream import train_stream
from tasks.warm_start.policies import PolicyError, keep_policy, remember_policy
from tests.tasks.training.fakes import LAYOUT, START, STEP, FakeReplica, World, config, make_group


@pytest.fixture
def make_run(tmp_path):
    """A run with objective settings, its first policy, and a checkpoint of version 8."""

    def make(*settings):
        overrides = [f"training.objective.{one}" for one in settings]
        run = create_run(str(tmp_path), "r", load_config("smoke", overrides, environment={}))
        folder = tmp_path / "warm"
        folder.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_text("{}")
        keep_policy(run.store, policy_prefix("first"), folder, "a test")
        remember_policy(run, policy_prefix("first"))
        manifest = CheckpointManifest(version=8, step=1, update=4, files={})
        run.store.write_record(f"{run.layout.checkpoint(8)}/manifest.json", manifest)
        return run

    return make


def test_nothing_is_named_that_is_not_needed(make_run):
    assert anchors_of(make_run(), 8) == {}


def test_proximal_is_the_start_of_the_step_and_the_reference_that_of_the_run(make_run):
    run = make_run("ratio=proximal", "kl=0.1")
    first = Anchor(run.store.local_path(policy_prefix("first")), 0)
    start = Anchor(run.store.local_path(run.layout.checkpoint(8)) / "policy", 8)
    assert anchors_of(run, 8) == {"proximal": start, "reference": first}
    assert anchors_of(run, 0) == {"proximal": first, "reference": first}
    with pytest.raises(CheckpointError, match=r"no checkpoint of version 4.*ratio=proximal"):
        anchors_of(run, 4)


def test_a_first_policy_that_is_gone_is_told(make_run):
    run = make_run("kl=0.1")
    run.store.delete(policy_prefix("first"))
    with pytest.raises(PolicyError, match="started from is gone"):
        anchors_of(run, 8)


def test_every_micro_step_of_a_step_names_the_same_policies(tmp_path):
    store = Store(tmp_path)
    asked, seen = [], []

    class Core(FakeReplica):
        def micro_step(self, step, update, micro_step, samples, anchors):
            seen.append((update, anchors))
            return super().micro_step(step, update, micro_step, samples)

    def anchors(version):
        asked.append(version)
        return {"proximal": Anchor(tmp_path / "start", version)}

    core = Core(World(store), "a", core=True)
    feed = GroupFeed()
    for number in range(4):
        feed.put(make_group(store, number))
    feed.close()
    train_stream(
        store=store,
        layout=LAYOUT,
        config=config(updates=2),
        step=STEP,
        groups=4,
        feed=feed,
        members=lambda: [core],
        spent=lambda: Spent(0.0, 0.0),
        anchors=anchors,
    )
    assert asked == [START]
    assert {update for update, _ in seen} == {0, 1}
    named = {"proximal": {"path": str(tmp_path / "start"), "version": START}}
    assert all(one == named for _, one in seen)
