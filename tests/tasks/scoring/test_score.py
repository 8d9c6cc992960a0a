"""Verdicts of real evaluations, and what happens when our side fails."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.run import RunConfig
from storage.objects import Store
from storage.records import Excluded, Scored, Split
from storage.run import Run, create_run
from tasks.problems.source import EvaluatorError, Problem, TestReport
from tasks.problems.specrepo.source import SpecRepo
from tasks.rollout.snapshot import freeze
from tasks.rollout.strays import find_strays
from tasks.scoring import score as module
from tasks.scoring.score import exclude, score
from tasks.scoring.verdicts import newest_verdict
from tests.tasks.scoring.left import leave_result

EXECUTION, QUERY = "s00000-q0000-e000", "s00000-q0000"
SANDBOX = "bubblewrap" if shutil.which("bwrap") else "process"

MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(files: dict[str, str] | None = None, outcome: str = "completed", **settings) -> Run:
        settings.setdefault("rollout", {"sandbox": SANDBOX})
        settings.setdefault("scoring", {"limit_s": 10})
        run = create_run(str(tmp_path / "store"), "r", RunConfig.model_validate(settings))
        folder = tmp_path / "workspace"
        folder.mkdir()
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        leave_result(run, QUERY, EXECUTION, folder, outcome, "why")
        return run

    return make


def run_score(run: Run, problem: str, **options):
    return score(run.store, run.layout, run.config, EXECUTION, problem, **options)


def problem_and_solution(config: RunConfig) -> tuple[str, str, str]:
    """A small problem, its file, and text that solves it: each function is a table of answers."""
    source = SpecRepo(config.problems)
    problem = source.ids(Split.TRAIN, 1, 1)[0]
    file = source.specification(problem).files[0]
    lines = []
    for function in file.functions:
        inputs = function.operation.inputs
        table = dict(zip(inputs, function.operation.expected(function.constant), strict=True))
        lines.append(f"def {function.name}(x):\n    return {table!r}[x]\n")
    return problem, file.path, "".join(lines)


@pytest.fixture
def solved() -> tuple[str, str, str]:
    return problem_and_solution(RunConfig())


@pytest.mark.real
def test_solution_empty_and_partial(make_run: MakeRun, solved: tuple[str, str, str]) -> None:
    problem, path, text = solved
    run = make_run({path: text})
    record = run_score(run, problem)
    assert isinstance(record.verdict, Scored)
    assert (record.verdict.reward, record.version, record.late) == (1.0, 0, False)
    assert record.verdict.tests_passed == record.verdict.tests_total > 1
    assert newest_verdict(run.store, run.layout, EXECUTION) == record


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "x = []\nwhile True: x.append('a' * 1000000)",
        "raise SystemExit(3)",
    ],
    ids=["empty", "exit", "kill", "memory", "systemexit"],
)
def test_what_the_agents_code_does_is_a_score(
    text: str, make_run: MakeRun, solved: tuple[str, str, str]
) -> None:
    problem, path, _ = solved
    record = run_score(make_run({path: text}), problem)
    assert isinstance(record.verdict, Scored)
    assert record.verdict.reward == 0.0


def test_a_hang_is_a_score(make_run: MakeRun, solved: tuple[str, str, str]) -> None:
    problem, path, _ = solved
    run = make_run({path: "while True: pass"}, scoring={"limit_s": 0.5})
    record = run_score(run, problem)
    assert isinstance(record.verdict, Scored)
    assert record.verdict.reward == 0.0


def test_a_timed_out_execution_is_scored_on_what_it_left(
    make_run: MakeRun, solved: tuple[str, str, str]
) -> None:
    problem, path, text = solved
    first = text.index("def ", 1)
    record = run_score(make_run({path: text[:first]}, outcome="timed_out"), problem)
    assert isinstance(record.verdict, Scored)
    assert record.verdict.timed_out
    assert 0 < record.verdict.reward < 1
    assert record.verdict.tests_passed == 1


def test_a_failed_host_is_excluded_at_once(make_run: MakeRun) -> None:
    run = make_run(outcome="host_failed")
    record = run_score(run, "any")
    assert record.verdict == Excluded(reason="host_failed", detail="why")
    assert run_score(run, "any") == record


def test_verdicts_are_numbered_and_kept(make_run: MakeRun, solved: tuple[str, str, str]) -> None:
    problem, path, text = solved
    run = make_run({path: text})
    first = exclude(run.store, run.layout, EXECUTION, QUERY, "evaluator", "broken")
    second = run_score(run, problem)  # an exclusion may be repaired
    assert run_score(run, problem) == second  # a reward stands
    run.store.write(run.layout.group(QUERY), b"sealed")
    third = run_score(run, problem, again=True)
    assert [first.version, second.version, third.version] == [0, 1, 2]
    assert [first.late, second.late, third.late] == [False, False, True]
    assert isinstance(first.verdict, Excluded)
    assert len(run.store.children(run.layout.verdicts(EXECUTION))) == 3


def test_a_damaged_workspace_is_our_fault(make_run: MakeRun, solved: tuple[str, str, str]) -> None:
    run = make_run()
    run.store.write(run.layout.frozen_workspace(EXECUTION), b"damaged")
    with pytest.raises(EvaluatorError, match="not a snapshot"):
        run_score(run, solved[0])
    run.store.delete(run.layout.frozen_workspace(EXECUTION))
    with pytest.raises(EvaluatorError, match="no such object"):
        run_score(run, solved[0])
    with pytest.raises(EvaluatorError, match="specrepo id"):
        run.store.write(run.layout.frozen_workspace(EXECUTION), freeze(Path(run.store.url), 1).data)
        run_score(run, "no such problem")
    assert newest_verdict(run.store, run.layout, EXECUTION) is None


class Broken:
    """A source whose evaluator crashes."""

    def __init__(self, config: object) -> None:
        pass

    def ids(self, split: Split, count: int, seed: int) -> list[str]:
        return []

    def load(self, problem_id: str) -> Problem:
        return Problem(problem_id, Split.TRAIN, "", {}, 0.0)

    def evaluate(self, problem: Problem, workspace: Path, limits: object, prefix: object):
        if problem.problem_id == "nonsense":
            return TestReport(3, 2, "", False)
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("problem", "said"), [("crash", "ZeroDivisionError"), ("nonsense", "3 of")]
)
def test_a_crash_of_the_evaluator_is_our_fault(
    problem: str, said: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(problems={"source": f"{__name__}:Broken"})
    with pytest.raises(EvaluatorError, match=said):
        run_score(run, problem)


def half(problem: Problem, tests: TestReport, workspace: Path) -> float:
    return 0.5


def not_a_number(problem: Problem, tests: TestReport, workspace: Path) -> float:
    return math.nan


def too_much(problem: Problem, tests: TestReport, workspace: Path) -> float:
    return 1.5


def crashes(problem: Problem, tests: TestReport, workspace: Path) -> float:
    raise KeyError("x")


def test_an_own_reward(make_run: MakeRun, solved: tuple[str, str, str]) -> None:
    run = make_run(problems={"reward": f"{__name__}:half"})
    record = run_score(run, solved[0])
    assert isinstance(record.verdict, Scored)
    assert record.verdict.reward == 0.5


@pytest.mark.parametrize("name", ["not_a_number", "too_much", "crashes", "missing"])
def test_a_wrong_reward_is_never_recorded(
    name: str, make_run: MakeRun, solved: tuple[str, str, str]
) -> None:
    run = make_run(problems={"reward": f"{__name__}:{name}"})
    with pytest.raises(EvaluatorError, match=name):
        run_score(run, solved[0])
    assert newest_verdict(run.store, run.layout, EXECUTION) is None


def test_failures_at_random_repeat_and_pass_with_a_retry(make_run: MakeRun) -> None:
    run = make_run(debug={"evaluator_failure_share": 0.5})
    names = [f"s00000-q0000-e{number:03d}" for number in range(200)]

    def fails(attempt: int) -> list[bool]:
        found = []
        for name in names:
            try:
                module._fail_at_random(run.config, name, attempt)
            except EvaluatorError:
                found.append(True)
            else:
                found.append(False)
        return found

    assert fails(0) == fails(0)
    assert fails(0) != fails(1)
    assert 60 < sum(fails(0)) < 140


@pytest.mark.skipif(SANDBOX == "process", reason="no bubblewrap")
def test_an_evaluation_has_no_network_and_leaves_nothing(
    make_run: MakeRun, solved: tuple[str, str, str], tmp_path: Path
) -> None:
    problem, path, text = solved
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = (
            "import socket, subprocess, sys\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            "try:\n"
            f"    socket.create_connection(('127.0.0.1', {port}), 1)\n"
            "except OSError:\n"
            "    pass\n"
            "else:\n"
            "    raise SystemExit\n"
        )
        record = run_score(make_run({path: reach + text}), problem)
    assert isinstance(record.verdict, Scored)
    assert record.verdict.reward == 1.0
    assert find_strays(str(tmp_path)) == []


def test_records_survive_a_store(make_run: MakeRun) -> None:
    run = make_run(outcome="host_failed")
    record = run_score(run, "any")
    assert newest_verdict(Store(run.store.url), run.layout, EXECUTION) == record
