"""Groups that outlive their step: the oldest are trained first, each once, whoever dies."""

from __future__ import annotations

import tempfile
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.scheduler import TrainingWork
from storage.objects import Store
from tasks.training.arrivals import Arrivals
from tasks.training.feed import GroupFeed
from tasks.training.ledger import Ledger
from tasks.training.metrics import Spent
from tasks.training.stream import train_stream
from tasks.training.work import training_work
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
from tests.tasks.training.test_streams import MEMORY, assignment, filled


@pytest.fixture
def world(tmp_path):
    return World(Store(tmp_path))


def arrivals_of(store, groups, *, updates=2, step=0, more=True):
    ledger, feed = Ledger(store, LAYOUT, step), GroupFeed()
    arrivals = Arrivals(
        store=store,
        layout=LAYOUT,
        ledger=ledger,
        feed=feed,
        config=config(updates=updates),
        step=step,
        groups=groups,
        carries=True,
        more=lambda: more,
    )
    return ledger, feed, arrivals


def train(world, core, names, **more):
    return train_stream(
        store=world.store,
        layout=LAYOUT,
        config=config(updates=2),
        step=STEP,
        groups=4,
        feed=filled(names),
        members=lambda: [core],
        spent=lambda: Spent(1.0, 0.5),
        carries=True,
        **more,
    )


def close(ledger, update):
    """As at the end of an update."""
    if ledger.version is None:
        ledger.open(START)
    ledger.begin_step(update, 1, 0.1)


def test_the_oldest_join_the_update_under_way_and_the_rest_is_left(tmp_path):
    store = Store(tmp_path)
    ages = [5, 3, 4, 2, 5]
    names = [make_group(store, number, version=ages[number]) for number in range(5)]
    ledger, feed, arrivals = arrivals_of(store, 4)
    feed.put(names[0])
    arrivals.pump()
    for name in names[1:]:
        feed.put(name)
    arrivals.pump()
    assert dict(ledger.groups()) == {names[0]: 0, names[3]: 0}
    assert arrivals.complete(0) and not arrivals.complete(1)
    close(ledger, 0)
    arrivals.pump()
    assert dict(ledger.groups()) == {names[0]: 0, names[3]: 0, names[1]: 1, names[2]: 1}
    assert [group.query_id for group in arrivals.early()] == [names[4]]
    assert (arrivals.missing(), arrivals.to_come()) == (0, 1), "a later step has more"
    close(ledger, 1)
    arrivals.pump()
    assert names[4] not in ledger.groups()
    ledger.close()


def test_what_is_sealed_early_counts_as_sealed_and_a_full_update_as_closing(tmp_path):
    store = Store(tmp_path)
    ledger, feed, arrivals = arrivals_of(store, 4, more=False)

    def work() -> TrainingWork:
        return training_work(
            ledger, arrivals, update=0, updates=2, budget=32, closing=False, awaited=False
        )

    feed.put(make_group(store, 0))
    arrivals.pump()
    assert not work().closing
    for number in (1, 2):
        feed.put(make_group(store, number))
    arrivals.pump()
    seen = work()
    assert (seen.ready, seen.closing) == (3, False), "80 tokens, 32 in a micro-step"
    assert seen.sealed == 3 + 2 and seen.expected == 5 + 2
    ledger.form(0, [[sample] for sample in arrivals.unformed(0)])
    while ledger.claim(0, "a"):
        pass
    assert work().closing
    ledger.close()


@settings(max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 4),
    st.lists(st.integers(0, 4), min_size=13, max_size=13),
    st.permutations(range(13)),
    st.lists(st.integers(0, 12), max_size=4),
    st.lists(st.integers(1, 5), max_size=3),
)
def test_every_group_is_in_one_update_of_one_step(share, updates, spare, ages, order, ends, deaths):
    """Two steps, groups that come in any batches, and attempts that die between two lines."""
    planned = share * updates
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        store = Store(folder)
        count = min(planned + spare, 13)
        names = {
            number: make_group(store, number, lengths=(4,), version=ages[number])
            for number in range(count)
        }
        coming = [names[number] for number in order if number in names]
        first = play_step(store, 0, planned, updates, coming, ends, deaths)
        left = [name for name in coming if name not in first]
        assert len(first) == planned and len(left) == count - planned
        for update in range(updates):
            assert sum(its == update for its in first.values()) == share
        more = planned - len(left)
        if more >= 0:
            fresh = [make_group(store, 100 + n, lengths=(4,), version=9) for n in range(more)]
            second = play_step(store, 1, planned, updates, [*left, *fresh], [], deaths)
            assert second.keys() == {*left, *fresh}
            last = [number for number, name in names.items() if second.get(name) == updates - 1]
            others = [number for number, name in names.items() if name in second]
            if last and not deaths:
                assert max(ages[n] for n in last) == max(ages[n] for n in others)


def play_step(store, step, planned, updates, coming, ends, deaths):
    """The update of each group that the step trains; whoever dies is followed by another."""
    bounds = sorted({0, len(coming), *(end % (len(coming) + 1) for end in ends)})
    for lives in [*deaths, None]:
        ledger, feed, arrivals = arrivals_of(store, planned, updates=updates, step=step)
        mortal(ledger, lives)
        try:
            for begin, end in pairwise(bounds):
                for name in coming[begin:end]:
                    feed.put(name)
                arrivals.pump()
                for update in range(updates):
                    if arrivals.complete(update) and not ledger.closed(update):
                        close(ledger, update)
                        arrivals.pump()
            for update in range(updates):
                assert arrivals.complete(update)
            return dict(ledger.groups())
        except KilledError:
            continue
        finally:
            ledger.close()
    raise AssertionError("the last attempt does not die")


class KilledError(RuntimeError):
    """The process that trains is gone."""


def mortal(ledger, lives):
    """The ledger's writer dies instead of writing its line number ``lives``."""
    write, left = ledger._do, [lives]

    def do(event):
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                raise KilledError
        write(event)

    ledger._do = do


def test_a_step_trains_as_many_as_it_plans_and_the_next_one_what_is_left(world):
    names = [make_group(world.store, number, version=START - number % 2) for number in range(6)]
    core = FakeReplica(world, "a", core=True)
    first = world.checkpoint[1].copy()
    records = train(world, core, names)
    trained = assignment(world)
    assert len(trained) == 4 and [record.groups for record in records] == [2, 2]
    assert {names[1], names[3], names[5]} <= trained.keys(), "the older ones"
    assert core.weights.tolist() == one_shot(world.store, trained, 2, first).tolist()
    assert all(record.busy_s == 0.0 for record in records)


def test_a_complete_update_waits_while_a_group_would_become_too_old(world):
    names = [make_group(world.store, number) for number in range(4)]
    core = FakeReplica(world, "a", core=True)
    ended, told = threading.Event(), threading.Event()

    def waits(what):
        if "too old" in what:
            told.set()

    def train_all():
        train(world, core, names, holds=lambda: not ended.is_set(), waits=waits)

    thread = threading.Thread(target=train_all)
    thread.start()
    assert told.wait(20)
    assert core.version == START
    ended.set()
    thread.join(20)
    assert not thread.is_alive() and core.version == START + 2
