"""A step: its plan, its groups, its ledger, the records of its updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flows.fsck.executions import StoredExecution, check_execution
from flows.fsck.finding import Kind
from flows.fsck.groups import check_group
from flows.fsck.reader import Reader
from storage.layout import execution_id
from storage.objects import StorageError
from storage.records import RecordError, StepDone, StepPlan, UpdateMetrics
from storage.samples import SealedGroup
from tasks.training.events import LedgerLine
from tasks.training.ledger_state import LedgerError, LedgerState, MicroState


def check_steps(reader: Reader) -> set[str]:
    """Check all steps; returns the executions that their plans tell of."""
    layout, steps = reader.layout, reader.run.config.training.steps
    lines = reader.lines(layout.metrics, UpdateMetrics)
    for (step, update), count in Counter((line.step, line.update) for line in lines).items():
        if count > 1:
            text = f"update {update} of step {step} has {count} lines"
            reader.note(Kind.REPEATED, layout.metrics, text)
    metrics = {(line.step, line.update): line for line in lines}
    planned: set[str] = set()
    version = 0
    for step in range(steps):
        plan = reader.record(layout.step_plan(step), StepPlan)
        if plan is None:
            if layout.step_plan(step) not in reader.keys and reader.below(layout.step(step)):
                reader.note(Kind.MISSING, layout.step_plan(step), "the step has begun without it")
            version = _Step(reader, step, version, {}, metrics).check()
            continue
        told = [query.query_id for query in plan.queries]
        key = layout.step_plan(step)
        reader.require(plan.step == step, key, f"it is the plan of step {plan.step}")
        reader.require(len(set(told)) == len(told), key, "a query is planned twice")
        groups = {}
        for query in plan.queries:
            names = [execution_id(query.query_id, member) for member in range(query.group_size)]
            planned.update(names)
            executions: Mapping[str, StoredExecution] = {
                name: check_execution(reader, name, query.query_id) for name in names
            }
            group = reader.group(layout.group(query.query_id))
            if group is not None:
                check_group(reader, query, step, group, executions)
                groups[query.query_id] = group
        if reader.below(layout.step(step)) and layout.step_done(step) in reader.keys:
            carried = _carried(reader, step)
            for name in told:
                key = layout.group(name)
                if name not in carried and key not in reader.keys:
                    reader.note(Kind.MISSING, key, f"step {step} is done")
        version = _Step(reader, step, version, groups, metrics).check()
    return planned


def _carried(reader: Reader, step: int) -> tuple[str, ...]:
    """Queries that a step has left to a later one; a record that is damaged is noted elsewhere."""
    try:
        return reader.store.read_record(reader.layout.step_done(step), StepDone).carried
    except (RecordError, StorageError):
        return ()


class _Step:
    """The training of one step.

    Args:
        version: that the step before ended with.
    """

    def __init__(
        self,
        reader: Reader,
        step: int,
        version: int,
        groups: Mapping[str, SealedGroup],
        metrics: Mapping[tuple[int, int], UpdateMetrics],
    ) -> None:
        self._reader = reader
        self._step = step
        self._version = version
        self._groups = groups
        self._metrics = metrics
        self._ledger = LedgerState()
        self._key = reader.layout.ledger(step)

    def check(self) -> int:
        """Returns the version that the step ends with, as far as it went."""
        reader, layout = self._reader, self._reader.layout
        self._replay()
        done = reader.record(layout.step_done(self._step), StepDone)
        updates = reader.run.config.training.updates_per_step
        if self._ledger.version is not None:
            reader.require(
                self._ledger.version == self._version,
                self._key,
                f"the step begins with version {self._ledger.version}, the one before it ended "
                f"with {self._version}",
            )
            self._version = self._ledger.version
        for update in range(updates):
            self._check_update(update, done is not None)
        self._check_micro_steps()
        key = layout.step_done(self._step)
        all_ended = all(self._ledger.stepped(update) is not None for update in range(updates))
        if all_ended and key not in reader.keys and not reader.below(layout.hosts):
            text = "all its updates have ended: the run stopped just before it said so; resume it"
            reader.note(Kind.LEFT_OVER, key, text)
        if done is not None:
            reader.require(done.step == self._step, key, f"it is of step {done.step}")
            text = f"it ends with version {done.policy_version}, its ledger with {self._version}"
            reader.require(done.policy_version == self._version, key, text)
        return self._version

    def _replay(self) -> None:
        """Go through the ledger as it was written, and refuse what must not have happened."""
        for line in self._reader.journal(self._key, LedgerLine):
            try:
                self._ledger.check(line.event)
                self._ledger.apply(line.event)
            except LedgerError as error:
                self._reader.note(Kind.CONTRADICTION, self._key, str(error))
            except KeyError as error:
                text = f"{line.event.event} of {error}, which was never formed"
                self._reader.note(Kind.CONTRADICTION, self._key, text)

    def _check_update(self, update: int, done: bool) -> None:
        reader = self._reader
        key = reader.layout.update(self._step, update)
        record = reader.record(key, UpdateMetrics)
        stepped = self._ledger.stepped(update)
        line = self._metrics.get((self._step, update))
        if stepped is None:
            if record is not None or done:
                text = f"update {update} never ended there, {key if record else 'the step'} has"
                reader.note(Kind.MISSING, self._key, text)
            return
        step = stepped.version - self._version
        reader.require(
            step in (0, 1),
            self._key,
            f"update {update} brings version {self._version} to {stepped.version}",
        )
        self._version = stepped.version
        if key not in reader.keys:
            later = reader.layout.update(self._step, update + 1)
            if done or later in reader.keys:
                reader.note(Kind.MISSING, key, "the ledger has its end")
            return
        if record is None:
            return
        told = (record.step, record.update, record.policy_version)
        expected = (self._step, update, stepped.version)
        reader.require(told == expected, key, f"it is of {told}, the ledger says {expected}")
        if line is not None:
            reader.require(
                line == record, reader.layout.metrics, f"its line of {key} differs from that"
            )
        elif done:
            reader.note(Kind.MISSING, reader.layout.metrics, f"the line of {key}")

    def _check_micro_steps(self) -> None:
        """Every sample of a group that was trained is in one micro-step, every micro-step that an
        update needed is at its core."""
        reader, ledger = self._reader, self._ledger
        for group, update in ledger.groups().items():
            sealed = self._groups.get(group)
            if sealed is None:
                key = reader.layout.group(group)
                if key not in reader.keys:
                    reader.note(Kind.MISSING, key, f"{self._key} trains it")
                continue
            formed = [ledger.formed(group, index) for index in range(len(sealed.samples))]
            if ledger.stepped(update) is not None and any(formed) and not all(formed):
                text = f"{formed.count(False)} of {len(formed)} samples of {group} were not trained"
                reader.note(Kind.MISSING, self._key, text)
        for update in range(reader.run.config.training.updates_per_step):
            for micro_step in ledger.micro_steps(update):
                self._check_micro_step(micro_step.id, micro_step.samples, micro_step.targets)
            open_ = len(ledger.micro_steps(update)) - ledger.count(update, MicroState.REDUCED)
            text = f"update {update} has ended without {open_} of its micro-steps"
            reader.require(ledger.stepped(update) is None or not open_, self._key, text)

    def _check_micro_step(
        self, name: str, samples: tuple[tuple[str, int], ...], targets: int
    ) -> None:
        found = 0
        for group, index in samples:
            sealed = self._groups.get(group)
            if sealed is None:
                return  # noted where the group is
            if index >= len(sealed.samples):
                text = f"{name} trains sample {index} of {group}, which has {len(sealed.samples)}"
                self._reader.note(Kind.MISSING, self._key, text)
                return
            found += int(sealed.samples[index].targets.sum())
        text = f"{name} was formed with {targets} targets, its samples have {found}"
        self._reader.require(found == targets, self._key, text)
