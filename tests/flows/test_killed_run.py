"""The flow is killed at random moments: everything is done, and once."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from cells.wanted import find_wanted
from flows.history import evaluations_of
from flows.plan import step_plan
from storage.journal import read_journal, read_lines
from storage.layout import execution_id
from storage.records import (
    ExecutionResult,
    Scored,
    UpdateMetrics,
    VerdictRecord,
    decode,
)
from storage.run import Run
from storage.samples import read_group
from tasks.training.events import LedgerLine, Restarted, Stepped
from tests.flows.orchestrated import Orchestrated

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]

STEPS = 2
UPDATES = 2
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))]
FIRST_EVALUATION = "evaluations/00000000.json"
SPREAD = {"executions": 16 * STEPS * 13 // 2, "steps": 16 * STEPS}
"""How much a run stores at least below these of its folders, some time before its end."""


def stored(folder: Path) -> int:
    """How far a run is: objects, and lines of journals."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.read_bytes().count(b"\n") if path.suffix == ".jsonl" else path.is_file()
    return total


def kill_at_random(site: Orchestrated, name: str, seed: int) -> None:
    """Kill the flow of a new run when it has stored a random share of what it will store of its
    executions or of its training, and go on with it."""
    drawn = random.Random(seed)
    part = drawn.choice(sorted(SPREAD))
    moment = drawn.randrange(SPREAD[part])
    folder = site.root / "runs" / name
    train = site.train(name, f"training.steps={STEPS}", "evaluation.before=true")
    site.until(lambda: (folder / FIRST_EVALUATION).exists(), "the first evaluation")
    site.until(
        lambda: stored(folder / part) >= moment or site.state(train) == "COMPLETED", "moment"
    )
    site.kill_flow()
    site.wait(train, "CRASHED", "COMPLETED")
    assert site.state(train) == "CRASHED", f"over before {part} had {moment}"
    check_wanted(site.run(name))
    go_on(site, train)


def check_wanted(run: Run) -> None:
    """A host elsewhere that starts now would begin with the weights of the newest step: those
    before it are deleted sooner or later."""
    begun = max(step for step in range(STEPS) if run.store.exists(run.layout.step_plan(step)))
    done = run.store.exists(run.layout.step_done(begun))
    wanted = find_wanted(run)
    assert wanted is not None
    assert wanted.version in {begun * UPDATES, (begun + done) * UPDATES}


def go_on(site: Orchestrated, train: str) -> None:
    """Retry a killed run, and again where that was lost: its worker reports the crash twice, and
    the second report, some seconds later, takes back a retry that came before it."""

    def begun() -> bool:
        found = site.flow_run(train)
        if found["state_type"] == "CRASHED" and found["run_count"] == 1:
            site.retry(train)
        return int(found["run_count"]) > 1

    site.until(begun, "the retry")
    site.wait(train, "COMPLETED", attempt=2)


def check(site: Orchestrated, name: str) -> None:
    run = site.run(name)
    # That of the end is made, though Prefect has seen an evaluation of this flow run before.
    assert set(evaluations_of(run)) == {0, STEPS * UPDATES}
    for step in range(STEPS):
        check_step(run, step)
    lines = [decode(line, UpdateMetrics) for line in read_lines(run.store, run.layout.metrics)]
    expected = [(step, update) for step in range(STEPS) for update in range(UPDATES)]
    assert [(line.step, line.update) for line in lines] == expected
    for line in lines:
        # Two groups of equal rewards, by chance in one update, leave it nothing to train.
        assert line.staleness_max == (line.update if line.target_tokens else 0)
    running = [
        task
        for one in site.steps(name)
        for task, state in site.tasks(one["id"])
        if state in ("Running", "Pending")
    ]
    assert running == []
    assert site.left() == []


def check_step(run: Run, step: int, *, core_lost: bool = False) -> None:
    """
    Args:
        core_lost: updates that the core made since its checkpoint were made again.
    """
    plan = step_plan(run, step, 0)
    assert plan.policy_version == step * UPDATES
    for query in plan.queries:
        group = read_group(run.store, run.layout.group(query.query_id))
        for member, sealed in enumerate(group.header.members):
            name = execution_id(query.query_id, member)
            result = run.store.read_record(run.layout.execution_result(name), ExecutionResult)
            # None lost the calls that were recorded before the kill.
            assert len(read_journal(run.store, run.layout.calls(name))) >= result.calls > 0
            verdict = run.store.read_record(run.layout.verdict(name, 0), VerdictRecord)
            assert run.store.children(run.layout.verdicts(name)) == ["0000.json"]
            assert sealed.verdict == verdict.verdict
            assert isinstance(verdict.verdict, Scored)
        for sample in group.samples:
            assert set(sample.versions[sample.targets]) == {plan.policy_version}
    events = [
        decode(line, LedgerLine).event for line in read_journal(run.store, run.layout.ledger(step))
    ]
    stepped: Counter[int] = Counter()
    for event in events:
        if isinstance(event, Restarted) and core_lost:
            del stepped[event.update]
        if isinstance(event, Stepped):
            stepped[event.update] += 1
    assert stepped == dict.fromkeys(range(UPDATES), 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flow_that_is_killed_at_a_random_moment_is_gone_on_with(
    orchestrated: Orchestrated, seed: int
) -> None:
    kill_at_random(orchestrated, f"killed-{seed}", seed)
    check(orchestrated, f"killed-{seed}")
