"""Joining and reducing: whose fault a failure is, and what is where afterwards."""

from __future__ import annotations

import pytest

from storage.objects import Store
from tasks.training.events import MicroStep
from tasks.training.exchange import CoreLostError, fetch, holds, join
from tasks.training.replica import Limits, Replica, ReplicaLostError
from tests.tasks.training.fakes import LAYOUT, START, STEP, FakeReplica, World, make_group


@pytest.fixture
def pair(tmp_path):
    """A world, a core, a satellite that has joined, and a micro-step in its gradient."""
    world = World(Store(tmp_path))
    group = make_group(world.store, 0)
    fakes = [FakeReplica(world, "a", core=True), FakeReplica(world, "b")]
    core, satellite = (Replica(fake, LAYOUT, Limits(5, 5), STEP) for fake in fakes)
    join(satellite, core.publish(), START)
    satellite.micro_step(MicroStep(id="m", update=0, samples=((group, 0),), tokens=8, targets=4))
    return world, core, satellite, fakes


def test_a_gradient_is_brought_home_once(pair):
    _, core, satellite, fakes = pair
    sent = fakes[1].gradient.copy()
    assert fetch(core, satellite, 0, {"m"})
    assert fakes[0].gradient.tolist() == sent.tolist()
    assert not fakes[1].micro_steps
    assert holds(core, START, {"m"})


def test_an_unheard_core_is_asked_what_it_has(pair):
    world, core, satellite, fakes = pair
    sent = fakes[1].gradient.copy()
    world.deaths = [["a", "reduce", "unheard", 0]]
    assert fetch(core, satellite, 0, {"m"})
    assert fakes[0].gradient.tolist() == sent.tolist()


def test_a_refused_reduce_costs_the_satellite_its_work(pair):
    world, core, satellite, fakes = pair
    world.deaths = [["a", "reduce", "before", 0]]
    with pytest.raises(ReplicaLostError, match="b: the core could not take its gradient"):
        fetch(core, satellite, 0, {"m"})
    assert not fakes[0].micro_steps


def test_a_core_that_says_nothing_is_lost(pair):
    world, core, satellite, _ = pair
    world.deaths = [["a", "reduce", "unheard", 0], ["a", "status", "before", 0]]
    with pytest.raises(CoreLostError):
        fetch(core, satellite, 0, {"m"})


def test_a_satellite_that_slept_has_nothing_to_bring(pair):
    _, core, satellite, fakes = pair
    fakes[1].empty()
    with pytest.raises(ReplicaLostError, match="holds 0 micro-steps, not the 1"):
        fetch(core, satellite, 0, {"m"})
    assert not fakes[0].micro_steps


def test_a_satellite_that_does_not_release_has_to_join_anew(pair):
    world, core, satellite, _ = pair
    world.deaths = [["b", "release", "before", 0]]
    assert not fetch(core, satellite, 0, {"m"})
    assert holds(core, START, {"m"})


def test_other_weights_are_refused_at_the_join(pair):
    _, core, satellite, _ = pair
    with pytest.raises(ReplicaLostError, match="pulled version 5 instead of 6"):
        join(satellite, core.publish(), START + 1)
    with pytest.raises(CoreLostError, match="has version 5, the update trains version 6"):
        holds(core, START + 1, set())


def test_an_answer_that_fits_another_command_is_a_loss(pair):
    _, _, satellite, _ = pair
    wrong = MicroStep(id="n", update=0, samples=(("s00000-q0000", 1),), tokens=8, targets=99)
    with pytest.raises(ReplicaLostError, match="was answered with"):
        satellite.micro_step(wrong)
