"""Any order of events: nothing is counted twice, nothing is lost, storage rebuilds the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage.layout import RunLayout
from storage.objects import Store
from tasks.training.events import Stepped
from tasks.training.ledger import Ledger, LedgerError, MicroState
from tasks.training.packing import SampleSize

LAYOUT = RunLayout("r")
REPLICAS = ("a", "b", "c")
UPDATES = 2
MEMORY = Path("/dev/shm")


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger and a model of where each sample's gradient is."""

    def __init__(self):
        super().__init__()
        folder = MEMORY if MEMORY.is_dir() else None
        self.folder = tempfile.TemporaryDirectory(dir=folder)
        self.store = Store(self.folder.name)
        self.ledger = Ledger(self.store, LAYOUT, 0)
        self.ledger.open(0)
        self.groups = {}
        self.unformed = []
        self.where = {}
        """Micro-step to (state, replica)."""
        self.done = set()

    def teardown(self):
        self.ledger.close()
        self.folder.cleanup()

    @rule(update=st.integers(0, UPDATES - 1), samples=st.integers(0, 3))
    def arrive(self, update, samples):
        name = f"g{len(self.groups)}"
        if self.ledger.closed(update):
            with pytest.raises(LedgerError):
                self.ledger.arrive(name, update)
            return
        self.ledger.arrive(name, update)
        self.groups[name] = update
        self.unformed += [SampleSize(name, index, 8, 4) for index in range(samples)]

    @precondition(lambda self: self.unformed)
    @rule()
    def form(self):
        first = self.unformed.pop(0)
        update = self.groups[first.group]
        if self.ledger.closed(update):
            with pytest.raises(LedgerError):
                self.ledger.form(update, [(first,)])
            return
        self.ledger.form(update, [(first,)])
        with pytest.raises(LedgerError):
            self.ledger.form(update, [(first,)])
        with pytest.raises(LedgerError):
            self.ledger.form(1 - update, [(SampleSize(first.group, 99, 8, 4),)])
        self.where[self.ledger.micro_steps(update)[-1].id] = (MicroState.READY, None)

    @rule(update=st.integers(0, UPDATES - 1), replica=st.sampled_from(REPLICAS))
    def claim(self, update, replica):
        claimed = self.ledger.claim(update, replica)
        ready = [name for name in self._of(update) if self.where[name][0] is MicroState.READY]
        if claimed is None:
            assert not ready
        else:
            assert claimed.id in ready
            self.where[claimed.id] = (MicroState.CLAIMED, replica)

    @precondition(lambda self: self.where)
    @rule(data=st.data(), replica=st.sampled_from(REPLICAS))
    def accumulate(self, data, replica):
        name = data.draw(st.sampled_from(sorted(self.where)))
        if self.where[name] == (MicroState.CLAIMED, replica):
            self.ledger.accumulate(name, replica, {"one": 1.0, "nan": float("nan")})
            self.where[name] = (MicroState.ACCUMULATED, replica)
        else:
            with pytest.raises(LedgerError):
                self.ledger.accumulate(name, replica, {})

    @rule(replica=st.sampled_from(REPLICAS))
    def reduce(self, replica):
        self.ledger.reduce(replica)
        self._move(MicroState.REDUCED, lambda s, r: s is MicroState.ACCUMULATED and r == replica)

    @rule(replica=st.sampled_from(REPLICAS))
    def die(self, replica):
        self.ledger.give_back(replica, "killed")
        self._move(MicroState.READY, lambda s, r: s is not MicroState.REDUCED and r == replica)

    @rule(update=st.integers(0, UPDATES - 1))
    def lose_core(self, update):
        self.ledger.restart(update, "killed")
        for name in self._of(update):
            self.where[name] = (MicroState.READY, None)
        self.done.discard(update)

    @rule(update=st.integers(0, UPDATES - 1))
    def step(self, update):
        states = {self.where[name][0] for name in self._of(update)}
        stepped = Stepped(update=update, version=1, grad_norm=None, seconds=0.0, at=0.0)
        if states <= {MicroState.REDUCED} and update not in self.done:
            self.ledger.begin_step(update, 1, 0.1)
            self.ledger.end_step(stepped)
            self.done.add(update)
        else:
            with pytest.raises(LedgerError):
                self.ledger.begin_step(update, 1, 0.1)
            with pytest.raises(LedgerError):
                self.ledger.end_step(stepped)

    @rule()
    def rebuild(self):
        before = self._picture()
        self.ledger.close()
        self.ledger = Ledger(self.store, LAYOUT, 0)
        assert self._picture() == before

    @invariant()
    def every_sample_is_in_one_place(self):
        for update in range(UPDATES):
            made = self.ledger.micro_steps(update)
            samples = [sample for micro_step in made for sample in micro_step.samples]
            assert len(samples) == len(set(samples))
            for state in MicroState:
                expected = sum(self.where[name][0] is state for name in self._of(update))
                assert self.ledger.count(update, state) == expected
            assert len(self.ledger.stats(update)) == self.ledger.count(update, MicroState.REDUCED)
            for replica in REPLICAS:
                assert set(self.ledger.held(update, replica)) == {
                    name
                    for name in self._of(update)
                    if self.where[name] == (MicroState.ACCUMULATED, replica)
                }

    def _of(self, update):
        return [name for name in self.where if name.startswith(f"u{update:04d}")]

    def _move(self, to, which):
        for name, (state, replica) in self.where.items():
            if which(state, replica):
                self.where[name] = (to, replica if to is MicroState.REDUCED else None)

    def _picture(self):
        ledger = self.ledger
        return (
            ledger.version,
            list(ledger.groups().items()),
            [
                (
                    ledger.micro_steps(update),
                    [ledger.count(update, state) for state in MicroState],
                    [ledger.held(update, replica) for replica in REPLICAS],
                    repr(ledger.stats(update)),  # a NaN is not equal to itself
                    ledger.stepping(update),
                    ledger.stepped(update),
                    ledger.closed(update),
                )
                for update in range(UPDATES)
            ],
        )


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30)


def test_a_torn_last_line_is_as_if_it_never_happened(tmp_path):
    store = Store(tmp_path)
    ledger = Ledger(store, LAYOUT, 0)
    ledger.open(3)
    ledger.arrive("g0", 0)
    ledger.form(0, [(SampleSize("g0", 0, 8, 4),)])
    ledger.claim(0, "a")
    ledger.close()
    path = store.local_path(store.keys(LAYOUT.ledger(0))[-1])
    path.write_bytes(path.read_bytes()[:-7])
    again = Ledger(store, LAYOUT, 0)
    assert again.count(0, MicroState.READY) == 1
    assert again.claim(0, "b") is not None
