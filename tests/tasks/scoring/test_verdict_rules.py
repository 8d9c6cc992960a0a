"""The table of docs/verdicts.md, a test a row."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.run import RunConfig
from storage.objects import StorageError
from storage.records import (
    Excluded,
    QueryPlan,
    Scored,
    Split,
    StepPlan,
)
from storage.run import Run, create_run
from tasks.problems.evaluation import BARE, Enclosure, EvaluationLimits
from tasks.problems.source import EvaluatorError, Problem, TestReport
from tasks.problems.subject import Subject, SubjectError
from tasks.scoring import score as module
from tasks.scoring.rescoring import VerdictState, preserved, rescore
from tasks.scoring.score import score
from tasks.scoring.task import give_up
from tasks.scoring.verdicts import newest_verdict
from tests.tasks.scoring.left import leave_result

QUERY = "s00000-q0000"
SOURCE = f"{__name__}:Answers"


class Answers:
    """A source with one test: ``answer()`` of ``answer.py`` is 42."""

    def __init__(self, config: object) -> None:
        pass

    def ids(self, split: Split, count: int, seed: int) -> list[str]:
        return [f"answer-{number}" for number in range(count)]

    def load(self, problem_id: str) -> Problem:
        return Problem(problem_id, Split.TRAIN, "answer", {})

    def evaluate(
        self,
        problem: Problem,
        workspace: Path,
        limits: EvaluationLimits,
        enclosure: Enclosure = BARE,
    ) -> TestReport:
        with Subject(workspace, limits, enclosure) as subject:
            try:
                passed = subject.call("answer.py", "answer", [[]]) == [42]
                return TestReport(int(passed), 1, "", False)
            except SubjectError as error:
                return TestReport(0, 1, str(error), "no time" in str(error))


def make_run(folder: Path, members: int = 1, **settings: object) -> Run:
    settings = {
        "problems": {"source": SOURCE},
        "rollout": {"sandbox": "bubblewrap", "group_size": max(members, 2)},
        "scoring": {"limit_s": 10},
        **settings,
    }
    run = create_run(str(folder / "store"), "r", RunConfig.model_validate(settings))
    query = QueryPlan(query_id=QUERY, problem_id="answer-0", split=Split.TRAIN, group_size=members)
    plan = StepPlan(step=0, policy_version=0, queries=(query,))
    run.store.write_record(run.layout.step_plan(0), plan)
    return run


def leave(run: Run, text: str | None, member: int = 0, outcome: str = "completed") -> str:
    """An execution that left this ``answer.py``; none at all for None."""
    name = f"{QUERY}-e{member:03d}"
    folder = Path(run.store.url).parent / f"left-{member}"
    folder.mkdir(exist_ok=True)
    if text is not None:
        (folder / "answer.py").write_text(text)
    leave_result(run, QUERY, name, folder, outcome, "no gateway")
    return name


def verdict_of(run: Run, name: str, **options: object) -> Scored | Excluded:
    return score(run.store, run.layout, run.config, name, "answer-0", **options).verdict


RIGHT = "def answer(): return 42\n"
SCORES = {
    "all tests pass": (RIGHT, 1.0),
    "a test fails": ("def answer(): return 41\n", 0.0),
    "nothing was written": (None, 0.0),
    "the code raises": ("raise KeyError\n", 0.0),
    "the code ends its process": ("import os; os._exit(0)\n", 0.0),
    "the code kills its process": ("import os; os.kill(os.getpid(), 9)\n", 0.0),
    "the code fills its memory": ("x = 'a' * 10**12\n", 0.0),
    "the code takes up processes": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: break\n" + RIGHT,
        None,
    ),
    "the code fills its disk": (
        "try:\n    f = open('big', 'wb')\n    while True: f.write(b'x' * 2**20)\n"
        "except OSError: pass\n" + RIGHT,
        None,
    ),
    "the code runs for ever": ("while True: pass\n", 0.0),
}


@pytest.mark.real
@pytest.mark.parametrize("case", SCORES)
def test_what_the_agents_code_does_is_a_score(tmp_path: Path, case: str) -> None:
    text, reward = SCORES[case]
    run = make_run(tmp_path, scoring={"limit_s": 8, "memory_mb": 128})
    found = verdict_of(run, leave(run, text))
    assert isinstance(found, Scored)
    assert reward is None or found.reward == reward
    assert found.tests_total == 1


@pytest.mark.real
def test_an_execution_at_its_limit_is_scored_on_what_it_left(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = verdict_of(run, leave(run, RIGHT, outcome="timed_out"))
    assert isinstance(found, Scored) and found.reward == 1.0 and found.timed_out


def refuse(error: BaseException) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise error

    return refused


@dataclass(frozen=True)
class Fault:
    """A failure of our side: where it is put, and how it is counted."""

    target: str
    error: BaseException
    reason: str


FAULTS = {
    "the store can't be read": Fault("thaw", StorageError("gone"), "storage"),
    "the sandbox does not start": Fault("_sandbox", module.SandboxError("no"), "sandbox"),
    "the archive is damaged": Fault("thaw", module.SnapshotError("torn"), "workspace"),
    "the problem can't be loaded": Fault("_source", module.ProblemSourceError("?"), "problem"),
    "the machine is out of disk": Fault("thaw", OSError(28, "no space"), "machine"),
    "the machine is out of memory": Fault("thaw", MemoryError(), "machine"),
    "the evaluator crashes": Fault("_checked", ZeroDivisionError(), "evaluator"),
    "the own reward crashes": Fault("reward_of", EvaluatorError("x"), "evaluator"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_fails_on_our_side_is_excluded_with_its_reason(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[case]
    run = make_run(tmp_path)
    name = leave(run, "raise SystemExit")
    with monkeypatch.context() as patched:
        patched.setattr(module, fault.target, refuse(fault.error))
        with pytest.raises(EvaluatorError) as caught:
            verdict_of(run, name)
    assert newest_verdict(run.store, run.layout, name) is None  # it may be tried again
    give_up(run, name, QUERY, caught.value)
    record = newest_verdict(run.store, run.layout, name)
    assert record is not None and isinstance(record.verdict, Excluded)
    assert record.verdict.reason == fault.reason
    # The repair: the same execution is scored, as the next version.
    assert isinstance(verdict_of(run, name), Scored)
    assert newest_verdict(run.store, run.layout, name).version == 1  # type: ignore[union-attr]


def test_a_failed_host_is_excluded(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = verdict_of(run, leave(run, None, outcome="host_failed"))
    assert found == Excluded(reason="host_failed", detail="no gateway")


@pytest.mark.real
def test_a_sandbox_that_is_killed_from_outside_is_excluded(tmp_path: Path) -> None:
    from tasks.problems.command import run_command

    with pytest.raises(EvaluatorError, match="killed from outside"):
        run_command(
            ["/bin/sh", "-c", "kill -9 $$"],
            cwd=tmp_path,
            environment={},
            limit_s=30,
            ends_all=True,
        )


def test_a_command_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    from tasks.problems.command import run_command

    script = "sleep 600 & echo $! > pid; yes | head -c 300000; sleep 600"
    ended = run_command(
        ["/bin/sh", "-c", script], cwd=tmp_path, environment=dict(os.environ), limit_s=2
    )
    assert ended.exit_code is None
    assert 0 < len(ended.output) <= 1 << 16
    pid = (tmp_path / "pid").read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    assert state.stdout.strip()[:1] in ("", "Z")


def rubric(
    problem: Problem, workspace: Path, limits: EvaluationLimits, enclosure: Enclosure
) -> TestReport:
    """An evaluator of one's own: half of the points for a file, half for a docstring."""
    file = workspace / "answer.py"
    text = file.read_text() if file.is_file() else ""
    return TestReport(file.is_file() + ('"""' in text), 2, "rubric", False)


def broken_rubric(*_: object) -> TestReport:
    raise ConnectionError("the judge does not answer")


def test_an_own_evaluator_takes_the_place_of_the_tests(tmp_path: Path) -> None:
    run = make_run(tmp_path, problems={"source": SOURCE, "evaluator": f"{__name__}:rubric"})
    found = verdict_of(run, leave(run, RIGHT))
    assert isinstance(found, Scored)
    assert (found.reward, found.tests_passed, found.log) == (0.5, 1, "rubric")


def test_a_judge_that_fails_is_no_zero(tmp_path: Path) -> None:
    path = f"{__name__}:broken_rubric"
    run = make_run(tmp_path, problems={"source": SOURCE, "evaluator": path})
    with pytest.raises(EvaluatorError, match="the judge does not answer"):
        verdict_of(run, leave(run, RIGHT))


def test_the_worked_example_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "verdicts.md").read_text()
    example = page.partition("    # mine.py")[2].partition("    gyre train")[0]
    (tmp_path / "mine.py").write_text(textwrap.dedent(f"    #{example}"))
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run(tmp_path, problems={"source": SOURCE, "evaluator": "mine:rubric"})
    text = 'def answer():\n    """It."""\n    return 42\ndef other(): pass\n'
    found = verdict_of(run, leave(run, text))
    assert isinstance(found, Scored)
    assert (found.reward, found.log) == (0.5, "1 documented")
    broken = verdict_of(run, leave(run, "def answer(:", 1))
    assert isinstance(broken, Scored) and broken.reward == 0.0


def always_right(*_: object) -> TestReport:
    return TestReport(1, 1, "", False)


def test_random_failures_are_no_zeros_and_a_retry_takes_only_them(tmp_path: Path) -> None:
    path = f"{__name__}:always_right"
    run = make_run(
        tmp_path,
        members=200,
        problems={"source": SOURCE, "evaluator": path},
        debug={"evaluator_failure_share": 0.05},
    )
    names = [leave(run, RIGHT, member) for member in range(200)]
    failed = []
    for name in names:
        try:
            verdict_of(run, name, attempt=0)
        except EvaluatorError:
            failed.append(name)
    assert 2 <= len(failed) <= 25
    before = {name: newest_verdict(run.store, run.layout, name) for name in names}
    assert all((before[name] is None) == (name in failed) for name in names)
    for name in names:
        for attempt in (1, 2):
            try:
                verdict_of(run, name, attempt=attempt)
                break
            except EvaluatorError:
                continue
    for name in names:
        record = newest_verdict(run.store, run.layout, name)
        assert record is not None and isinstance(record.verdict, Scored)
        assert record.verdict.reward == 1.0
        if name not in failed:
            assert record == before[name]  # nothing was evaluated twice


def test_rescoring_chooses_adds_and_never_overwrites(tmp_path: Path) -> None:
    path = f"{__name__}:always_right"
    run = make_run(tmp_path, members=4, problems={"source": SOURCE, "evaluator": path})
    names = [leave(run, RIGHT, member) for member in range(3)]
    names.append(leave(run, None, 3, outcome="host_failed"))
    verdict_of(run, names[0])
    give_up(run, names[1], QUERY, EvaluatorError("no judge"))
    run.store.write(run.layout.group(QUERY), b"sealed")

    def chosen(*arguments: object) -> list[str]:
        return [one.execution for one in preserved(run, *arguments)]  # type: ignore[arg-type]

    assert chosen() == names[:3]  # the failed host left nothing
    assert chosen(0, VerdictState.SCORED) == names[:1]
    assert chosen(0, VerdictState.EXCLUDED) == names[1:3]
    assert chosen(0, None, "evaluator") == names[1:2]
    assert chosen(0, None, "no_verdict") == names[2:3]
    assert chosen(0, VerdictState.TIMED_OUT) == []
    every = list(preserved(run))
    for one in every:
        rescore(run, one, 0, last=True)
        rescore(run, one, 1, last=True)  # a retry finds it done
    records = [newest_verdict(run.store, run.layout, name) for name in names[:3]]
    assert [(record.version, record.late) for record in records if record] == [
        (1, True),
        (1, True),
        (0, True),
    ]
    assert run.store.read(run.layout.group(QUERY)) == b"sealed"


def test_a_reward_stands_when_its_rescoring_fails(tmp_path: Path) -> None:
    run = make_run(tmp_path, problems={"source": SOURCE, "evaluator": f"{__name__}:always_right"})
    name = leave(run, RIGHT)
    first = verdict_of(run, name)
    (one,) = preserved(run)
    run.store.delete(run.layout.frozen_workspace(name))
    with pytest.raises(EvaluatorError):
        rescore(run, one, 0, last=True)
    record = newest_verdict(run.store, run.layout, name)
    assert record is not None and record.verdict == first
