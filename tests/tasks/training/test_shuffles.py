"""Which groups an update gets: by arrival, by windows, or shuffled over the whole step."""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.training import ShuffleKind
from storage.objects import Store
from storage.samples import read_group
from tasks.sampling.guard import ExclusionGuard
from tasks.training.arrivals import Arrivals
from tasks.training.feed import GroupFeed
from tasks.training.ledger import Ledger
from tasks.training.plan import check_excluded, group_facts, update_shares
from tasks.training.shuffle import Order, counted_together
from tests.tasks.training.fakes import LAYOUT, STEP, config, make_group
from tests.tasks.training.test_streams import MEMORY

kinds = st.sampled_from(list(ShuffleKind))


def names_of(count):
    return [f"s00000-q{number:04d}" for number in range(count)]


def placed_by(order, batches, *, ended=True):
    """The order in which groups that come in these batches are placed."""
    found, waiting = [], []
    for number, batch in enumerate(batches):
        waiting += batch
        last = ended and number == len(batches) - 1
        due = order.placeable(waiting, placed=len(found), ended=last)
        found += due
        waiting = [name for name in waiting if name not in due]
    return found, waiting


def cut(names, ends):
    """The names in batches, cut at these places."""
    bounds = sorted({0, len(names), *(end % (len(names) + 1) for end in ends)})
    return [names[a:b] for a, b in pairwise(bounds)]


@given(kinds, st.integers(1, 20), st.integers(2, 7), st.lists(st.integers(0, 99)), st.randoms())
def test_the_order_follows_from_the_seed_and_the_groups(kind, count, window, ends, random):
    """However they come in batches; of a window, or of all, it does not matter who comes first."""
    size = {ShuffleKind.ARRIVAL: 1, ShuffleKind.WINDOW: window}.get(kind, count)
    order = Order(kind, size, count, seed=3, step=0)
    names = names_of(count)
    random.shuffle(names)
    at_once, _ = placed_by(order, [names])
    in_batches, left = placed_by(order, cut(names, ends))
    assert in_batches == at_once and not left
    for begin in range(0, count, size):
        own = names[begin : begin + size]
        assert sorted(at_once[begin : begin + size]) == sorted(own)
        mixed = random.sample(own, len(own))
        again = [*names[:begin], *mixed, *names[begin + size :]]
        assert placed_by(order, [again])[0] == at_once


@given(kinds, st.integers(1, 20), st.integers(2, 7), st.integers(0, 19), st.integers(0, 5))
def test_nothing_waits_without_need_and_groups_beyond_the_plan_come_last(
    kind, count, window, come, more
):
    size = {ShuffleKind.ARRIVAL: 1, ShuffleKind.WINDOW: window}.get(kind, count)
    order = Order(kind, size, count, seed=3, step=0)
    names = names_of(min(come, count))
    placed, waiting = placed_by(order, [names], ended=False)
    whole = len(names) if len(names) == count else len(names) - len(names) % size
    assert len(placed) == whole and len(waiting) == len(names) - whole
    beyond = [f"x{number}" for number in range(more)]
    placed, waiting = placed_by(order, [names_of(count), *([one] for one in beyond)], ended=False)
    assert placed[count:] == beyond and not waiting


def test_every_order_of_a_few_groups_comes_about_as_often():
    orders = Counter(
        tuple(placed_by(Order(ShuffleKind.GLOBAL, 3, 3, seed, 0), [names_of(3)])[0])
        for seed in range(600)
    )
    assert len(orders) == 6 and min(orders.values()) > 60


def test_steps_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(placed_by(Order(ShuffleKind.GLOBAL, 12, 12, seed, step), [names_of(12)])[0])
        for seed in range(3)
        for step in range(3)
    }
    assert len(orders) == 9


class KilledError(RuntimeError):
    """The process that trains is gone."""


@settings(max_examples=40)
@given(
    kinds,
    st.integers(2, 9),
    st.integers(1, 4),
    st.integers(2, 5),
    st.lists(st.integers(0, 99), max_size=5),
    st.lists(st.integers(1, 4), max_size=3),
)
def test_an_attempt_that_dies_is_continued_with_the_same_updates(
    kind, count, updates, window, ends, deaths
):
    """Updates have whole groups and even shares, whoever dies between two lines of the ledger."""
    settings = {"training.shuffle": kind.value, "training.shuffle_window": window}
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        found = {}
        for name, plan in (("disturbed", deaths), ("alone", [])):
            store = Store(f"{folder}/{name}")
            names = [make_group(store, number, lengths=(4,)) for number in range(count)]
            for lives in [*plan, None]:
                ledger, feed = Ledger(store, LAYOUT, STEP), GroupFeed()
                mortal(ledger, lives)
                arrivals = Arrivals(
                    store=store,
                    layout=LAYOUT,
                    ledger=ledger,
                    feed=feed,
                    config=config(updates=updates, **settings),
                    step=STEP,
                    groups=count,
                )
                try:
                    for batch in cut(names, ends if plan else []):
                        for one in batch:
                            feed.put(one)
                        arrivals.pump()
                    break
                except KilledError:
                    continue
                finally:
                    ledger.close()
            found[name] = dict(ledger.groups())
            assert arrivals.missing() == 0
        assert found["disturbed"] == found["alone"]
        shares = Counter(found["alone"].values())
        assert [shares[one] for one in range(updates)] == list(update_shares(count, updates))


def mortal(ledger, lives):
    """Let the process die when it has written so many groups; None lets it live."""
    arrive = ledger.arrive
    left = lives

    def arrive_or_die(group, update):
        nonlocal left
        if left == 0:
            raise KilledError
        left = left if left is None else left - 1
        arrive(group, update)

    ledger.arrive = arrive_or_die


@pytest.mark.parametrize(
    ("kind", "expected"), [("arrival", (4, 3, 3)), ("window", (4, 4, 2)), ("global", (10,))]
)
def test_exclusions_count_with_those_that_are_shuffled_together(kind, expected):
    training = config(
        updates=3, **{"training.shuffle": kind, "training.shuffle_window": 4}
    ).training
    assert counted_together(training, 10) == expected
    assert sum(counted_together(training, 8)) == 8


@settings(max_examples=40)
@given(kinds, st.lists(st.integers(0, 2), min_size=2, max_size=8), st.integers(1, 3))
def test_what_the_guard_lets_through_is_never_refused_by_an_update(kind, excluded, updates):
    """A group that is sealed can't be mended: an update that refused it would stop for ever."""
    chosen = config(
        updates=updates, **{"training.shuffle": kind.value, "training.shuffle_window": 3}
    )
    count = len(excluded)
    guard = ExclusionGuard(counted_together(chosen.training, count), 2, 0.5)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        store = Store(folder)
        ledger, feed = Ledger(store, LAYOUT, STEP), GroupFeed()
        arrivals = Arrivals(
            store=store,
            layout=LAYOUT,
            ledger=ledger,
            feed=feed,
            config=chosen,
            step=STEP,
            groups=count,
        )
        for number, missing in enumerate(excluded):
            rewards = (None,) * missing + (0.5,) * (2 - missing)
            try:
                guard.admit("q", missing)
            except RuntimeError:
                rewards, missing = (0.5, 0.5), 0
                guard.admit("q", missing)
            feed.put(make_group(store, number, rewards=rewards))
            arrivals.pump()
        for update in range(updates):
            check_excluded(arrivals.counted_with(update), 0.5)
        everyone = [f for update in range(updates) for f in arrivals.of(update)]
        assert len(everyone) == count
        assert everyone[0] == group_facts(read_group(store, LAYOUT.group(everyone[0].query_id)),
                                          chosen.training.pack)  # fmt: skip
        ledger.close()
