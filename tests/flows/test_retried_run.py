"""Evaluators that fail and are repaired: a retry scores what failed, trains it, repeats nothing."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from flows.plan import step_plan
from storage.journal import read_journal
from storage.records import Excluded, UpdateMetrics, VerdictRecord, decode
from storage.run import Run
from tasks.problems.source import EvaluatorError
from tasks.training.events import LedgerLine, Stepped
from tests.flows import evaluators
from tests.flows.browser import browser_page, press
from tests.flows.orchestrated import Orchestrated

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]

NAME = "retried"
EXECUTIONS = 16
FAILING_SHARE = 0.05


@dataclass(frozen=True)
class Kept:
    """What a run has stored of a step that no later attempt may change or do again."""

    rollouts: dict[str, str]
    verdicts: dict[str, str]
    excluded: frozenset[str]
    """Those of the verdicts that leave their execution out because the evaluator failed."""
    groups: dict[str, str]
    stepped: Counter[int]

    @classmethod
    def of(cls, run: Run, step: int) -> Kept:
        keys = run.store.keys(f"{run.layout.prefix}/executions")
        own = [key for key in keys if f"/s{step:05d}-" in key]
        verdicts = [key for key in own if "/verdicts/" in key]
        groups = run.store.keys(f"{run.layout.prefix}/groups")
        lines = read_journal(run.store, run.layout.ledger(step))
        events = [decode(line, LedgerLine).event for line in lines]
        return cls(
            rollouts=digests(run, [key for key in own if "/verdicts/" not in key]),
            verdicts=digests(run, verdicts),
            excluded=frozenset(key for key in verdicts if evaluator_failed(run, key)),
            groups=digests(run, [key for key in groups if f"/s{step:05d}-" in key]),
            stepped=Counter(event.update for event in events if isinstance(event, Stepped)),
        )


def digests(run: Run, keys: list[str]) -> dict[str, str]:
    return {key: hashlib.sha256(run.store.read(key)).hexdigest() for key in keys}


def evaluator_failed(run: Run, key: str) -> bool:
    verdict = run.store.read_record(key, VerdictRecord).verdict
    return isinstance(verdict, Excluded) and verdict.reason == EvaluatorError.reason


def failing(first: int) -> str:
    """Calls of the reward function of one step that fail, drawn at random, at least one."""
    drawn = random.Random(f"{NAME} {first}")
    count = max(1, round(FAILING_SHARE * EXECUTIONS))
    return " ".join(str(first + at) for at in drawn.sample(range(EXECUTIONS), count))


@dataclass(frozen=True)
class History:
    """The run after each of its attempts."""

    run: Run
    train: str
    failed: Kept
    """Step 0, when its evaluators had failed."""
    repaired: Kept
    """Step 0, after the retry from the browser."""
    calls: tuple[int, ...]
    """Of the reward function, after each attempt."""
    steps: tuple[str, ...]
    """Flow runs of steps at the end, the oldest first."""
    left: tuple[tuple[str, ...], ...]
    """Daemons that each attempt left behind."""


@pytest.fixture(scope="module")
def history(orchestrated: Orchestrated) -> History:
    """Step 0 fails, `train` is retried in the browser; step 1 fails, it is retried on its own, and
    then `train` once more."""
    site = orchestrated
    calls, left = [], []

    def ended(flow_run: str, state: str, attempt: int) -> None:
        site.wait(flow_run, state, attempt=attempt)
        calls.append(evaluators.calls(site.evaluators))
        left.append(tuple(site.left()))

    broken = site.evaluators / evaluators.BROKEN
    before = evaluators.calls(site.evaluators)
    broken.write_text(failing(before))
    train = site.train(NAME, "training.steps=2", "scoring.max_excluded_share=0")
    ended(train, "FAILED", 1)
    run = site.run(NAME)
    failed = Kept.of(run, 0)
    # Repaired; the evaluators of the next step are not.
    again = len(broken.read_text().split())
    broken.write_text(failing(calls[-1] + again))
    with browser_page() as page:
        press(site, page, train, "Retry", "Retry")
    ended(train, "FAILED", 2)
    repaired = Kept.of(run, 0)
    broken.unlink()
    step = site.steps(NAME)[-1]["id"]
    site.retry(step)
    ended(step, "COMPLETED", 2)
    site.retry(train)
    ended(train, "COMPLETED", 3)
    steps = tuple(one["id"] for one in site.steps(NAME))
    return History(run, train, failed, repaired, (before, *calls), steps, tuple(left))


def test_a_step_stops_before_an_update_that_lacks_too_many(history: History) -> None:
    groups = step_plan(history.run, 0, 0).queries
    assert len(history.failed.groups) == len(groups) - 1
    assert len(history.failed.verdicts) == EXECUTIONS
    assert len(history.failed.excluded) == 1
    assert sum(history.failed.stepped.values()) < history.run.config.training.updates_per_step


def test_no_rollout_and_no_update_is_repeated(history: History) -> None:
    assert history.repaired.rollouts == history.failed.rollouts
    for step in range(2):
        stepped = Kept.of(history.run, step).stepped
        assert stepped == dict.fromkeys(range(2), 1)
    assert Kept.of(history.run, 0) == history.repaired


def test_only_what_failed_is_scored_again(history: History) -> None:
    before, failed, retried, step, _ = history.calls
    assert failed - before == EXECUTIONS
    assert retried - failed == 1 + EXECUTIONS  # the step that follows
    assert step - retried == 1
    assert history.failed.verdicts.items() <= history.repaired.verdicts.items()
    assert history.repaired.excluded == history.failed.excluded
    added = history.repaired.verdicts.keys() - history.failed.verdicts.keys()
    (left_out,) = history.failed.excluded
    assert added == {left_out.replace("0000.json", "0001.json")}
    assert history.failed.groups.items() <= history.repaired.groups.items()


def test_a_retry_has_tasks_only_for_what_failed(
    history: History, orchestrated: Orchestrated
) -> None:
    first, again, next_step = history.steps
    names = Counter(name.split(" ")[0] for name, _ in orchestrated.tasks(first))
    assert names["rollout"] == names["score"] == names["samples"] == 4
    tasks = dict(orchestrated.tasks(again))
    names = Counter(name.split(" ")[0].split("-")[0] for name in tasks)
    assert names["rollout"] == 0
    assert names["score"] == names["samples"] == 1
    assert set(tasks.values()) == {"Completed"}
    assert orchestrated.state(next_step) == "COMPLETED"


def test_a_retried_step_needs_no_further_run(history: History, orchestrated: Orchestrated) -> None:
    names = [one["name"] for one in orchestrated.steps(NAME)]
    assert names == [f"{NAME} step 0", f"{NAME} step 0", f"{NAME} step 1"]
    assert orchestrated.state(history.train) == "COMPLETED"


def test_every_update_has_one_line(history: History) -> None:
    run = history.run
    lines = run.store.read(run.layout.metrics).splitlines()
    updates = [decode(line, UpdateMetrics) for line in lines]
    assert [(one.step, one.update) for one in updates] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sum(one.valid for one in updates) == 2 * EXECUTIONS


def test_every_attempt_releases_the_daemons(history: History) -> None:
    assert set(history.left) == {()}
    assert history.run.store.children(history.run.layout.hosts) == []
