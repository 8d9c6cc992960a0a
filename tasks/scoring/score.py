"""From an ended execution to its verdict."""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from configs.problems import ProblemsConfig, SandboxKind
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import StorageError, Store
from storage.records import (
    Excluded,
    ExecutionOutcome,
    ExecutionResult,
    RecordError,
    Scored,
    VerdictRecord,
)
from tasks.problems.source import (
    EvaluationLimits,
    EvaluatorError,
    ProblemSource,
    ProblemSourceError,
    TestReport,
    make_source,
)
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sandboxes.limits import Limits
from tasks.rollout.sandboxes.sandbox import Sandbox, SandboxError
from tasks.rollout.snapshot import SnapshotError, remove_tree, thaw
from tasks.scoring.enclosure import RoomEnclosure
from tasks.scoring.evaluator import make_evaluator
from tasks.scoring.reward import make_reward, reward_of
from tasks.scoring.verdicts import add_verdict, newest_verdict

_LOG_CHARS = 4000
_TESTS_MB = 256
"""Memory of an evaluation beside that of the agent's code and its workspace: the test runner, and
temporary files."""
_REASONS: dict[type[Exception], str] = {
    StorageError: "storage",
    RecordError: "storage",
    SnapshotError: "workspace",
    SandboxError: "sandbox",
    ProblemSourceError: "problem",
    OSError: "machine",
    MemoryError: "machine",
}
"""What failed on our side, as a word to count exclusions by. Others are the evaluator's own."""
_OURS: tuple[type[Exception], ...] = (EvaluatorError, *_REASONS)


def score(
    store: Store,
    layout: RunLayout,
    config: RunConfig,
    execution: str,
    problem_id: str,
    *,
    attempt: int = 0,
    again: bool = False,
) -> VerdictRecord:
    """Evaluate the frozen workspace of an execution and record the verdict.

    A reward that is recorded already is returned as it is, unless ``again``. An execution whose
    host failed is excluded at once: there is nothing to evaluate. Everything that the agent's code
    does in the evaluation, a crash or a hang included, is a score.

    Args:
        attempt: counts the tries of this evaluation; only ``debug.evaluator_failure_share`` looks
            at it.

    Raises:
        EvaluatorError: our side failed, and its ``reason`` says in what. Try again later; after the
            last try call ``exclude`` with it.
    """
    try:
        known = newest_verdict(store, layout, execution)
        if known is not None and isinstance(known.verdict, Scored) and not again:
            return known
        result = store.read_record(layout.execution_result(execution), ExecutionResult)
        if result.outcome is ExecutionOutcome.HOST_FAILED:
            if known is not None:
                return known
            return exclude(store, layout, execution, result.query_id, "host_failed", result.detail)
        _fail_at_random(config, execution, attempt)
        started = time.monotonic()
        verdict = _evaluated(store, config, result, problem_id)
        seconds = time.monotonic() - started
        return add_verdict(store, layout, execution, result.query_id, verdict, seconds)
    except tuple(_REASONS) as error:
        raise _failure(execution, error) from error


def exclude(
    store: Store, layout: RunLayout, execution: str, query: str, reason: str, detail: str
) -> VerdictRecord:
    """Record that an execution has no reward, because our side failed.

    Args:
        reason: a word that can be counted: ``host_failed``, or the ``reason`` of the error.

    Raises:
        StorageError: the store is full or refuses.
    """
    verdict = Excluded(reason=reason, detail=detail[:_LOG_CHARS])
    return add_verdict(store, layout, execution, query, verdict, 0.0)


def _evaluated(store: Store, config: RunConfig, result: ExecutionResult, problem_id: str) -> Scored:
    """The score of a fresh copy of the workspace, in a folder of its own."""
    if result.workspace_key is None:
        raise EvaluatorError(f"{result.execution_id}: it left no workspace")
    source = _source(config.problems)
    problem = source.load(problem_id)
    own = config.problems.evaluator
    evaluate = make_evaluator(own) if own else source.evaluate
    folder = Path(tempfile.mkdtemp(prefix="gyre-evaluation-"))
    try:
        limits = EvaluationLimits(config.scoring.limit_s, config.scoring.memory_mb)
        sandbox = _sandbox(config.rollout.sandbox, config.rollout.image)
        with closing(RoomEnclosure(sandbox, folder.resolve(), _bounds(config))) as enclosure:
            workspace = enclosure.room.workspace
            data = store.read(result.workspace_key)
            thaw(data, workspace, int(config.rollout.workspace_limit_mb * 1e6))
            tests = _checked(evaluate(problem, workspace, limits, enclosure))
        reward = reward_of(make_reward(config.problems.reward), problem, tests, workspace)
    except _OURS:
        raise
    except Exception as error:
        raise EvaluatorError(
            f"{result.execution_id}: the evaluation of {problem_id} failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        remove_tree(folder)
    return Scored(
        reward=reward,
        timed_out=result.outcome is ExecutionOutcome.TIMED_OUT,
        tests_passed=tests.passed,
        tests_total=tests.total,
        log=_log(tests),
    )


def _bounds(config: RunConfig) -> Limits:
    """None is below what a process of the tests sets for itself, which would be refused."""
    return Limits(
        memory_mb=config.scoring.memory_mb
        + _TESTS_MB
        + math.ceil(config.rollout.workspace_limit_mb),
        file_mb=config.scoring.memory_mb,
        cpu_s=(math.ceil(config.scoring.limit_s) + 1) * (os.cpu_count() or 1),
        processes=config.rollout.processes,
    )


def _failure(execution: str, error: Exception) -> EvaluatorError:
    failure = EvaluatorError(f"{execution}: {type(error).__name__}: {error}")
    failure.reason = next(word for kind, word in _REASONS.items() if isinstance(error, kind))
    return failure


def _checked(tests: TestReport) -> TestReport:
    if tests.total < 1 or not 0 <= tests.passed <= tests.total:
        raise EvaluatorError(f"{tests.passed} of {tests.total} tests passed: not a report")
    return tests


def _log(tests: TestReport) -> str:
    text = tests.log[:_LOG_CHARS]
    return f"{text}\nthe evaluation's own time limit ended it" if tests.timed_out else text


def _fail_at_random(config: RunConfig, execution: str, attempt: int) -> None:
    share = config.debug.evaluator_failure_share
    drawn = random.Random(f"evaluator {config.seed} {execution} {attempt}").random()
    if drawn < share:
        raise EvaluatorError(
            f"{execution}: made to fail, try {attempt} (debug.evaluator_failure_share={share:g})"
        )


@lru_cache(maxsize=8)
def _source(config: ProblemsConfig) -> ProblemSource:
    return make_source(config)


@lru_cache(maxsize=4)
def _sandbox(kind: SandboxKind, image: str) -> Sandbox:
    return make_sandbox(kind, image)
