"""Groups that are too old for their update: left out, counted, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.objects import Store
from storage.samples import read_group
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.plan import group_facts, without_stale
from tasks.training.stream import train_stream
from tests.tasks.training.fakes import (
    LAYOUT,
    START,
    STEP,
    FakeReplica,
    World,
    config,
    make_group,
    one_shot,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Store(tmp_path))


@pytest.mark.parametrize("mean", ["with_spread", "all_valid"])
def test_a_group_older_than_the_bound_is_left_out_of_its_update(world: World, mean: str) -> None:
    """The first update trains on START, the second on START + 1: a group of START - 1 is one
    version older than the bound of 1 only for the second."""
    names = [make_group(world.store, number, version=START - 1) for number in range(2)]
    names += [make_group(world.store, number) for number in (2, 3)]
    order = [names[0], names[2], names[1], names[3]]
    feed = GroupFeed()
    for name in order:
        feed.put(name)
    feed.close()
    core, first = FakeReplica(world, "a", core=True), world.checkpoint[1].copy()
    settings = {"staleness.max": 1, "training.objective.update_mean": mean}
    records = train_stream(
        store=world.store,
        layout=LAYOUT,
        config=config(updates=2, **settings),
        step=STEP,
        groups=4,
        feed=feed,
        members=lambda: [core],
        spent=lambda: Spent(0.0, 0.0),
    )
    trained = {names[0]: 0, names[2]: 0, names[3]: 1}
    assert core.weights.tolist() == one_shot(world.store, trained, 2, first).tolist()
    assert [record.groups_stale for record in records] == [0, 1]
    assert [record.groups for record in records] == [2, 2]
    assert [record.staleness_max for record in records] == [1, 1]
    assert [record.executions for record in records] == [4, 4], "they ran all the same"
    steps = [args for _, command, args in world.log if command == "step"]
    assert [args["executions"] for args in steps] == [4, 2]


def test_one_old_target_makes_a_group_stale(world: World) -> None:
    facts = group_facts(read_group(world.store, LAYOUT.group(make_group(world.store, 0))))
    assert without_stale(facts, START + 3, 3) is facts
    stale = without_stale(facts, START + 4, 3)
    assert (stale.samples, stale.voters, stale.versions, stale.stale) == ((), 0, {}, True)
    assert (stale.executions, stale.rewards) == (facts.executions, facts.rewards)
    nothing = without_stale(stale, START + 9, 3)
    assert nothing is stale, "a group without targets is never too old"
