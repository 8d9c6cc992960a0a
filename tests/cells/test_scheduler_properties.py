"""What holds for every policy whatever happens: a stateful machine plays the manager."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cells.scheduler import (
    CellView,
    Policy,
    Role,
    Snapshot,
    Timings,
    TrainingWork,
    make_policy,
)

CAPACITY = 4
MICRO_STEPS = 3
SWITCH_S = 5.0


class Cells(RuleBasedStateMachine):
    """Executions come and end, groups are sealed and trained, switches take their time.

    A group is one execution, so that training depends on rollouts as closely as it can.
    """

    policy: Policy

    @initialize(cells=st.integers(1, 5), dwell=st.sampled_from([0.0, 20.0]))
    def start(self, cells: int, dwell: float) -> None:
        self.time = 0.0
        self.make(cells, dwell)
        self.core = "c0"
        self.roles = {f"c{n}": Role.ROLLOUT for n in range(cells)}
        self.targets: dict[str, Role] = {}
        self.since = dict.fromkeys(self.roles, 0.0)
        self.bound = dict.fromkeys(self.roles, 0)
        self.queued = 0
        self.sealed = 0
        self.claimed: dict[str, int] = {}
        self.launched = 0
        self.quiet_moves = 0

    def make(self, cells: int, dwell: float) -> None:
        self.policy = make_policy("elastic", dwell_s=dwell, min_gain=0.1)

    def seen(self) -> Snapshot:
        claimed = len(self.claimed)
        unsealed = self.queued + sum(self.bound.values())
        expected = self.sealed + claimed + unsealed * MICRO_STEPS
        return Snapshot(
            time=self.time,
            queued=self.queued,
            running=sum(self.bound.values()),
            cells=tuple(
                CellView(
                    cell_id=name,
                    role=role,
                    live=self.bound[name],
                    is_core=name == self.core,
                    capacity=CAPACITY,
                    version=0,
                    target=self.targets.get(name),
                    since=self.since[name],
                )
                for name, role in self.roles.items()
            ),
            training=TrainingWork(expected, self.sealed, self.sealed, claimed),
            timings=Timings(micro_step_s=60.0),
        )

    def serving(self) -> list[str]:
        return [name for name, role in self.roles.items() if role is Role.ROLLOUT]

    def admit(self) -> None:
        for name in self.serving():
            taken = min(self.queued, CAPACITY - self.bound[name])
            self.bound[name] += taken
            self.queued -= taken

    def settle(self) -> None:
        """Carry out what the policy says until it says nothing more at this moment."""
        self.admit()
        for _ in range(len(self.roles) + 1):
            found = self.policy.decide(self.seen())
            assert found == self.policy.decide(self.seen()), "a policy is a pure function"
            if not found:
                return
            assert len({move.cell_id for move in found}) == len(found)
            for move in found:
                self.carry_out(move.cell_id, move.to)
        raise AssertionError("a policy goes on moving cells although nothing has changed")

    def carry_out(self, name: str, to: Role) -> None:
        role = self.roles[name]
        assert role is not Role.SWITCHING and role is not to
        self.roles[name] = Role.SWITCHING
        self.targets[name] = to
        self.since[name] = self.time
        self.quiet_moves += 1
        if to is Role.TRAINING:
            orphans, self.bound[name] = self.bound[name], 0
            for other in self.serving():
                taken = min(orphans, CAPACITY - self.bound[other])
                self.bound[other] += taken
                orphans -= taken
            assert orphans == 0, "a cell left live executions for which nobody has room"

    @rule(count=st.integers(1, 12))
    def launch(self, count: int) -> None:
        self.queued += count
        self.launched += count
        self.quiet_moves = 0
        self.settle()

    @precondition(lambda self: any(self.bound.values()))
    @rule(data=st.data())
    def execution_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, live in self.bound.items() if live)))
        self.bound[name] -= 1
        self.sealed += MICRO_STEPS
        self.quiet_moves = 0
        self.settle()

    @precondition(lambda self: self.targets)
    @rule(data=st.data())
    def switch_ends(self, data: st.DataObject) -> None:
        # Whoever was told to serve ends its micro-step first.
        name = data.draw(st.sampled_from(sorted(self.targets)))
        self.finish_micro_step(name)
        self.time += SWITCH_S
        self.roles[name] = self.targets.pop(name)
        self.since[name] = self.time
        self.settle()

    @rule()
    def replicas_work(self) -> None:
        for name in sorted(self.claimed):
            self.finish_micro_step(name)
        for name, role in self.roles.items():
            if role is Role.TRAINING and self.sealed and name not in self.claimed:
                self.sealed -= 1
                self.claimed[name] = 1
        self.settle()

    @rule(seconds=st.floats(0.1, 100))
    def time_passes(self, seconds: float) -> None:
        self.time += seconds
        self.settle()

    def finish_micro_step(self, name: str) -> None:
        self.claimed.pop(name, None)

    @invariant()
    def live_work_has_a_cell(self) -> None:
        # A cell that is on its way to training can only be called back when it has arrived.
        if self.queued + sum(self.bound.values()) and Role.TRAINING not in self.targets.values():
            assert self.seen().heading(Role.ROLLOUT) or self.training_comes_first()

    def training_comes_first(self) -> bool:
        return False

    @invariant()
    def switches_are_bounded(self) -> None:
        # Between two launches or ends no cell goes there and back more than once.
        assert self.quiet_moves <= 3 * len(self.roles)

    @invariant()
    def training_is_not_starved(self) -> None:
        seen = self.seen()
        settled = all(self.time - since >= 20 for since in self.since.values())
        room = (len(self.serving()) - 1) * CAPACITY >= seen.waterlevel
        if self.sealed and settled and room and not self.targets and len(self.serving()) > 1:
            assert self.starvation_is_the_policys_choice() or seen.heading(Role.TRAINING)

    def starvation_is_the_policys_choice(self) -> bool:
        return False

    def teardown(self) -> None:
        """From wherever it is, a run ends: all executions end and everything is trained."""
        if not hasattr(self, "roles"):
            return
        for _ in range(40 * (self.launched + 5)):
            if self.is_over():
                return
            for name in tuple(self.targets):
                self.finish_micro_step(name)
                self.roles[name] = self.targets.pop(name)
                self.since[name] = self.time
            busy = [name for name, live in self.bound.items() if live]
            if busy:
                self.bound[busy[0]] -= 1
                self.sealed += MICRO_STEPS
            self.time += 30.0
            self.replicas_work()
        raise AssertionError(f"never ends: {self.seen()}")

    def is_over(self) -> bool:
        waiting = self.queued + sum(self.bound.values())
        return not (waiting or self.sealed or self.claimed or self.targets)


class ColocatedCells(Cells):
    def make(self, cells: int, dwell: float) -> None:
        self.policy = make_policy("colocate")

    def starvation_is_the_policys_choice(self) -> bool:
        return self.seen().waterlevel > 0

    def training_comes_first(self) -> bool:
        return self.sealed + len(self.claimed) > 0


class SplitCells(Cells):
    @initialize(cells=st.integers(2, 5), dwell=st.just(0.0))
    def start(self, cells: int, dwell: float) -> None:
        super().start(cells, dwell)
        # The first decision comes before the first execution.
        self.settle()
        assert all(to is Role.TRAINING for to in self.targets.values())

    def make(self, cells: int, dwell: float) -> None:
        self.policy = make_policy("async", training_cells=1 + (cells - 2) // 2)

    @invariant()
    def nobody_switches_after_the_first_decision(self) -> None:
        training = self.policy.training_cells  # type: ignore[attr-defined]
        assert len(self.seen().heading(Role.TRAINING)) == training


_BOUNDED = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestElastic = Cells.TestCase
TestElastic.settings = _BOUNDED
TestColocate = ColocatedCells.TestCase
TestColocate.settings = _BOUNDED
TestFixedSplit = SplitCells.TestCase
TestFixedSplit.settings = _BOUNDED
