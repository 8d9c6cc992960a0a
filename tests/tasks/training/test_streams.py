"""Streamed, elastic training equals one-shot training, whatever arrives when and whoever dies."""

from __future__ import annotations

import copy
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.client import FencedError
from cells.scheduler import (
    POLICY_NAMES,
    CellView,
    Role,
    Snapshot,
    TrainingWork,
    make_policy,
)
from storage.objects import Store
from storage.records import UpdateMetrics
from tasks.training import round as round_module
from tasks.training.exchange import CoreLostError
from tasks.training.feed import GroupFeed
from tasks.training.ledger import Ledger
from tasks.training.metrics import Spent
from tasks.training.plan import TooManyExcludedError
from tasks.training.resume import VersionMismatchError
from tasks.training.round import NoReplicaError
from tasks.training.stream import read_updates, train_stream
from tests.tasks.training.fakes import (
    LAYOUT,
    START,
    STEP,
    FakeReplica,
    FlowKilledError,
    World,
    config,
    make_group,
    one_shot,
)

MEMORY = Path("/dev/shm")
GLOBAL = {"training.shuffle": "global"}


def filled(names):
    feed = GroupFeed()
    for name in names:
        feed.put(name)
    feed.close()
    return feed


def train(world, replicas, names, *, updates=2, feed=None, members=None, **more):
    def save(metrics):
        core = replicas[0]
        state = (core.version, core.weights.copy(), copy.deepcopy(core.last_step))
        if more.get("checkpoints", True):
            world.checkpoint = state

    return train_stream(
        store=world.store,
        layout=LAYOUT,
        config=config(updates=updates, **more.get("settings", {})),
        step=STEP,
        groups=more.get("groups", len(names)),
        feed=feed or filled(names),
        members=members or (lambda: replicas),
        spent=lambda: Spent(1.0, 0.5),
        on_update=more.get("on_update", save),
        report=more.get("report", lambda _: None),
    )


def assignment(world):
    ledger = Ledger(world.store, LAYOUT, STEP)
    found = dict(ledger.groups())
    ledger.close()
    return found


@pytest.fixture
def world(tmp_path):
    return World(Store(tmp_path))


def crew(world, count=3):
    return [FakeReplica(world, name, core=name == "a") for name in "abcdef"[:count]]


def start(world):
    return world.checkpoint[1].copy()


def test_all_groups_are_trained_once_by_all_replicas(world):
    names = [make_group(world.store, number) for number in range(5)]
    replicas, first = crew(world), start(world)
    records = train(world, replicas, names, updates=2)
    assert assignment(world) == dict(zip(names, [0, 0, 0, 1, 1], strict=True))
    assert (
        replicas[0].weights.tolist() == one_shot(world.store, assignment(world), 2, first).tolist()
    )
    assert [(r.update, r.policy_version) for r in records] == [(0, START + 1), (1, START + 2)]
    assert [r.staleness_max for r in records] == [0, 1]
    assert records == read_updates(world.store, LAYOUT, STEP, 2)
    assert all(r.logprob_gap == 0.25 and 0 < r.clip_fraction <= 1 for r in records)
    steps = [args for _, command, args in world.log if command == "step"]
    assert [args["executions"] for args in steps] == [6, 4]


def test_groups_ledger_and_records_may_lie_in_any_store(tmp_path):
    """Object stores have no files: the ledger is then a row of immutable segments."""
    url = f"memory://{tmp_path.name}-{id(tmp_path)}"
    world = World(Store(url))
    names = [make_group(world.store, number) for number in range(4)]
    replicas, first = crew(world), start(world)
    world.deaths.append([None, "step", "after", 0])
    with pytest.raises(FlowKilledError):
        train(world, replicas, names)
    records = train(World(Store(url), checkpoint=world.checkpoint), replicas, names)
    assert records == read_updates(Store(url), LAYOUT, STEP, 2)
    assert (
        replicas[0].weights.tolist() == one_shot(world.store, assignment(world), 2, first).tolist()
    )


def test_training_starts_before_the_last_group_is_sealed(world):
    names = [make_group(world.store, number) for number in range(4)]
    replicas, first, feed = crew(world), start(world), GroupFeed()
    trained = threading.Event()
    feed.put(names[0])
    original = replicas[0].micro_step

    def micro_step(**args):
        trained.set()
        return original(**args)

    replicas[0].micro_step = micro_step

    def later():
        assert trained.wait(20)
        for name in names[1:]:
            feed.put(name)
        feed.close()

    thread = threading.Thread(target=later)
    thread.start()
    train(world, replicas, names, feed=feed)
    thread.join()
    assert (
        replicas[0].weights.tolist() == one_shot(world.store, assignment(world), 2, first).tolist()
    )


def test_a_shuffled_step_waits_for_its_last_group_and_has_one_order(world):
    names = [make_group(world.store, number) for number in range(6)]
    feed, seen = GroupFeed(), []
    for name in names[:-1]:
        feed.put(name)

    def report(work):
        """Looks at the ledger while training waits."""
        if not seen:
            seen.append((dict(assignment(world)), work))
            feed.put(names[-1])

    train(world, crew(world), names, feed=feed, report=report, settings=GLOBAL)
    assert seen[0][0] == {} and (seen[0][1].sealed, seen[0][1].expected > 0) == (0, True)
    other = World(Store(world.store.url + "-other"))
    for number in range(6):
        make_group(other.store, number)
    train(other, crew(other), names[::-1], settings=GLOBAL)
    assert assignment(other) == assignment(world)
    assert list(assignment(other)) == list(assignment(world)) != names


def test_a_leaving_replica_brings_its_gradient_home_first(world):
    names = [make_group(world.store, number) for number in range(6)]
    replicas, first, feed = crew(world, 2), start(world), GroupFeed()
    feed.put(names[0])
    gone = False

    def members():
        nonlocal gone
        if not gone and replicas[1].micro_steps:
            gone = True
            for name in names[1:]:
                feed.put(name)
            feed.close()
        return replicas[:1] if gone else replicas

    # The core is slow to begin, so that the satellite gets a share of the first group.
    original = replicas[0].micro_step

    def micro_step(**args):
        if not gone:
            feed.wait(0.3)
        return original(**args)

    replicas[0].micro_step = micro_step
    train(world, replicas, names, updates=1, feed=feed, members=members)
    commands = [command for name, command, _ in world.log if name == "b"]
    assert commands[-2:] == ["freeze", "release"]
    assert (
        replicas[0].weights.tolist() == one_shot(world.store, assignment(world), 1, first).tolist()
    )


def test_updates_without_spread_count_but_do_not_step(world):
    names = [make_group(world.store, number, rewards=(0.5, 0.5)) for number in range(2)]
    names += [make_group(world.store, number) for number in (2, 3)]
    replicas = crew(world)
    records = train(world, replicas, names, updates=2)
    assert [r.policy_version for r in records] == [START, START + 1]
    assert (records[0].grad_norm, records[0].target_tokens) == (0.0, 0)
    assert records[0].pass_rate == 0.5


def test_fewer_groups_than_planned_still_make_every_update(world):
    names = [make_group(world.store, 0)]
    records = train(world, crew(world), names, updates=3, groups=6)
    assert [r.policy_version for r in records] == [START + 1, START + 1, START + 1]


def test_too_many_excluded_stops_before_the_step(world):
    names = [make_group(world.store, 0, rewards=(0.0, 1.0, None, None, None))]
    replicas, first = crew(world), start(world)
    with pytest.raises(TooManyExcludedError):
        train(world, replicas, names, updates=1)
    assert replicas[0].weights.tolist() == first.tolist()
    assert read_updates(world.store, LAYOUT, STEP, 1) == ()


def test_records_are_not_repeated_and_late_groups_are_not_trained(world):
    names = [make_group(world.store, number) for number in range(2)]
    replicas = crew(world)
    records = train(world, replicas, names)
    weights = replicas[0].weights.tolist()
    late = make_group(world.store, 9)
    seen = []
    again = train(world, replicas, [late, *names], on_update=seen.append)
    assert again == records and seen == []
    assert replicas[0].weights.tolist() == weights


def test_an_older_checkpoint_replays_the_same_updates(world):
    names = [make_group(world.store, number) for number in range(6)]
    replicas, first = crew(world), start(world)
    records = train(world, replicas, names, updates=3, checkpoints=False)
    weights = replicas[0].weights.tolist()
    replicas[0].start()
    assert replicas[0].weights.tolist() == first.tolist()
    seen = []
    again = train(
        world,
        replicas,
        names[::-1],
        updates=3,
        on_update=seen.append,
        settings={"training.learning_rate": 1e-4},
    )
    assert replicas[0].weights.tolist() == weights
    rates = [args["learning_rate"] for _, command, args in world.log if command == "step"]
    assert len(rates) == 6 and len(set(rates)) == 1  # what was settled first stays
    assert again == records and seen == list(records)


def test_a_step_that_nobody_wrote_down_is_not_repeated(world):
    names = [make_group(world.store, number) for number in range(4)]
    replicas, first = crew(world), start(world)
    world.deaths.append([None, "step", "after", 0])
    with pytest.raises(FlowKilledError):
        train(world, replicas, names)
    records = train(world, replicas, names)
    assert (
        replicas[0].weights.tolist() == one_shot(world.store, assignment(world), 2, first).tolist()
    )
    assert [r.grad_norm for r in records] == [2.0, 2.0]


def test_foreign_weights_are_refused(world):
    names = [make_group(world.store, number) for number in range(2)]
    replicas = crew(world)
    train(world, replicas, names)
    replicas[0].version = START + 7
    with pytest.raises(VersionMismatchError, match=r"has version 12; .* knows 5 to 7"):
        train(world, replicas, names)


def test_a_core_that_slept_trains_the_update_again(world):
    names = [make_group(world.store, number) for number in range(4)]
    replicas, first, feed = crew(world, 2), start(world), GroupFeed()
    feed.put(names[0])
    looks = 0

    def members():
        """The core is away for a while after its first micro-step; sleep drops its gradient."""
        nonlocal looks
        if replicas[0].micro_steps and not looks:
            looks = 1
            replicas[0].empty()
            for name in names[1:]:
                feed.put(name)
            feed.close()
            return replicas[1:]
        return replicas

    train(world, replicas, names, updates=1, feed=feed, members=members)
    assert (
        replicas[0].weights.tolist() == one_shot(world.store, assignment(world), 1, first).tolist()
    )


def test_a_core_that_slept_while_a_satellite_worked_waits_for_it(world):
    names = [make_group(world.store, number) for number in range(4)]
    replicas, first = crew(world, 2), start(world)
    at_work, go, stage = threading.Event(), threading.Event(), 0
    original = replicas[1].micro_step

    def micro_step(**args):
        at_work.set()
        assert go.wait(20)
        return original(**args)

    replicas[1].micro_step = micro_step

    def members():
        nonlocal stage
        if stage == 0 and at_work.is_set() and replicas[0].micro_steps:
            stage = 1
            replicas[0].empty()
            return replicas[1:]
        stage += stage > 0
        if stage > 3:
            go.set()
        return replicas

    train(world, replicas, names, updates=1, members=members)
    assert stage > 3
    assert (
        replicas[0].weights.tolist() == one_shot(world.store, assignment(world), 1, first).tolist()
    )


def test_a_core_that_always_forgets_is_given_up(world):
    names = [make_group(world.store, number) for number in range(2)]
    replicas = crew(world, 1)
    original = replicas[0].status

    def status():
        replicas[0].empty()
        return original()

    replicas[0].status = status
    with pytest.raises(CoreLostError, match="lost its gradient 9 times"):
        train(world, replicas, names, updates=1)


def test_a_core_with_other_weights_is_noticed_before_the_step(world):
    names = [make_group(world.store, number) for number in range(2)]
    replicas = crew(world, 1)
    original = replicas[0].micro_step

    def micro_step(**args):
        replicas[0].version = START + 3
        return original(**args)

    replicas[0].micro_step = micro_step
    with pytest.raises(CoreLostError, match="has version 8, the update trains version 5"):
        train(world, replicas, names)
    assert not [command for _, command, _ in world.log if command == "step"]


def test_a_fenced_command_ends_training(world):
    names = [make_group(world.store, number) for number in range(2)]
    replicas = crew(world, 1)

    def fenced(**_):
        raise FencedError("epoch 1 is older than 2")

    replicas[0].micro_step = fenced
    with pytest.raises(FencedError):
        train(world, replicas, names)


def test_a_failed_feed_ends_training(world):
    feed = GroupFeed()
    feed.fail(ValueError("the step is cancelled"))
    with pytest.raises(ValueError, match="cancelled"):
        train(world, crew(world), [], groups=2, feed=feed)


def test_nobody_to_train_is_said(world, monkeypatch):
    names = [make_group(world.store, number) for number in range(2)]
    now = iter(range(0, 10**9, 100))
    monkeypatch.setattr(round_module.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(GroupFeed, "wait", lambda self, limit_s: None)
    with pytest.raises(NoReplicaError, match="waits for a core"):
        train(world, [], names)


def test_work_is_reported_until_nothing_is_left(world):
    names = [make_group(world.store, number) for number in range(4)]
    seen: list[TrainingWork] = []
    train(world, crew(world), names, report=seen.append)
    assert seen[-1] == TrainingWork()
    assert all(work.expected > 0 for work in seen[:-1])


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_policy_calls_a_core_that_has_to_train_a_finished_step_again(world, policy):
    """It was lost when its last update had been written down, and before any checkpoint."""
    names = [make_group(world.store, number) for number in range(4)]
    replicas = crew(world, 1)
    records = train(world, replicas, names, checkpoints=False)
    weights = replicas[0].weights.tolist()
    replicas[0].start()
    told: list[TrainingWork] = []
    moved = []

    def members():
        """The core serves, and nothing lives, until the policy wants it to train."""
        if told and not moved:
            cells = tuple(
                CellView(
                    cell_id=name,
                    role=Role.ROLLOUT,
                    live=0,
                    is_core=name == "a",
                    capacity=8,
                    version=0,
                )
                for name in "ab"
            )
            seen = Snapshot(time=100.0, queued=0, running=0, cells=cells, training=told[-1])
            moved.extend(m for m in make_policy(policy).decide(seen) if m.cell_id == "a")
            assert moved, f"the core stays in rollout with {told[-1]}"
        return replicas if moved else []

    again = train(world, replicas, names, members=members, report=told.append)
    assert moved[0].to is Role.TRAINING
    assert again == records and replicas[0].weights.tolist() == weights


deaths = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", None]),
        st.sampled_from(
            ["micro_step", "freeze", "reduce", "release", "publish", "pull", "step", "status", "*"]
        ),
        st.sampled_from(["before", "after", "unheard"]),
        st.integers(0, 6),
    ),
    max_size=5,
)


@settings(max_examples=35)
@given(
    groups=st.integers(2, 7),
    updates=st.integers(1, 3),
    replicas=st.integers(1, 3),
    plan=deaths,
    presence=st.lists(st.sets(st.sampled_from("abc"), min_size=1), max_size=12),
    checkpoint_every=st.integers(1, 3),
    shuffle=st.sampled_from(["arrival", "window", "global"]),
    random=st.randoms(use_true_random=False),
)
def test_any_deaths_and_any_membership_end_with_the_same_weights(
    groups, updates, replicas, plan, presence, checkpoint_every, shuffle, random
):
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        world = World(Store(folder))
        first = start(world)
        names = [
            make_group(world.store, number, lengths=tuple(random.choices(range(4, 24), k=2)))
            for number in range(groups)
        ]
        fakes = crew(world, replicas)
        world.deaths = [list(death) for death in plan]
        looks = iter(presence)

        def members():
            present = next(looks, set("abc"))
            return [fake for fake in fakes if fake.name in present]

        def save(metrics: UpdateMetrics):
            if metrics.update % checkpoint_every == 0:
                core = fakes[0]
                last = copy.deepcopy(core.last_step)
                world.checkpoint = (core.version, core.weights.copy(), last)

        records = None
        for _ in range(len(plan) + 1):
            random.shuffle(names)
            try:
                records = train(
                    world,
                    fakes,
                    names,
                    updates=updates,
                    members=members,
                    on_update=save,
                    settings={"training.shuffle": shuffle, "training.shuffle_window": 2},
                )
                break
            except (CoreLostError, VersionMismatchError):
                fakes[0].start()
            except FlowKilledError:
                continue
        assert records is not None and len(records) == updates
        expected = one_shot(world.store, assignment(world), updates, first)
        assert fakes[0].weights.tolist() == expected.tolist()
        assert fakes[0].version == START + sum(r.grad_norm != 0 for r in records)
        assert np.array_equal(
            [r.policy_version for r in records],
            np.arange(1, updates + 1).clip(max=groups) + START,
        )
