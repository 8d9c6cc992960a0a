"""Harbor folders: the reward that the tests write, and what a sandbox can't serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from configs.problems import ProblemsConfig
from tasks.problems.check import check_problems
from tasks.problems.harbor.source import Harbor, read_reward
from tasks.problems.source import EvaluationLimits, EvaluatorError, ProblemSourceError
from tests.tasks.problems.folders import evaluated, harbor_task


def source(folder: Path, **settings: object) -> Harbor:
    settings = {"source": "harbor", "path": str(folder), "held_out_share": 0, **settings}
    return Harbor(ProblemsConfig.model_validate(settings))


@pytest.mark.real
def test_the_reward_is_what_the_tests_write(tmp_path: Path) -> None:
    harbor_task(tmp_path / "sum")
    found = source(tmp_path)
    problem = found.load("sum")
    assert problem.files == {"numbers.txt": b"1\n2\n3\n"}
    assert (problem.workdir, problem.limit_s) == ("/app", 120)
    for files, reward in (({"answer.txt": "6"}, 1.0), ({"answer.txt": "7"}, 0.5), ({}, 0.0)):
        report = evaluated(found, problem, files)
        assert (report.reward, report.timed_out) == (reward, False), report.log
        assert (report.passed, report.total) == (int(reward == 1), 1)


REWARD = "/logs/verifier/reward.txt"
RUNS_THE_AGENTS_CODE = (
    "#!/bin/bash\ncd /app\nreward=0\n[ -f prog.py ] && python3 prog.py\n"
    "[ -f prog.py ] && reward=1\necho $reward > /logs/verifier/reward.txt\n"
)


@pytest.mark.real
@pytest.mark.parametrize(
    "program",
    [
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        f"import os; os.mkdir('{REWARD}'); os.kill(os.getppid(), 9)",
        f"import os; os.symlink('/etc/passwd', '{REWARD}'); os.kill(os.getppid(), 9)",
        f"import os; open('{REWARD}', 'w').write('nan'); os.kill(os.getppid(), 9)",
    ],
    ids=["kills", "folder", "link", "nonsense"],
)
def test_code_that_breaks_the_tests_is_a_zero_and_not_left_out(
    tmp_path: Path, program: str
) -> None:
    harbor_task(tmp_path / "sum", **{"tests/test.sh": RUNS_THE_AGENTS_CODE})
    found = source(tmp_path)
    report = evaluated(found, found.load("sum"), {"prog.py": program})
    assert (report.reward, report.passed) == (0.0, 0)


@pytest.mark.real
@pytest.mark.parametrize("code", [126, 127])
def test_exit_codes_of_missing_tools_do_not_leave_out(tmp_path: Path, code: int) -> None:
    """Tests that end with the agent's program may end with any code that it likes."""
    script = "#!/bin/bash\nset -e\n[ ! -f prog.sh ] || bash prog.sh\necho 0 > " + REWARD + "\n"
    harbor_task(tmp_path / "sum", **{"tests/test.sh": script})
    found = source(tmp_path)
    report = evaluated(found, found.load("sum"), {"prog.sh": f"exit {code}\n"})
    assert (report.reward, report.passed) == (0.0, 0)


@pytest.mark.real
def test_an_agent_that_does_nothing_is_a_zero_where_the_solution_gets_a_reward(
    tmp_path: Path,
) -> None:
    script = "#!/bin/bash\nset -e\ngrep -qx 6 answer.txt\necho 1 > " + REWARD + "\n"
    harbor_task(tmp_path / "sum", **{"tests/test.sh": script})
    found = source(tmp_path)
    problem = found.load("sum")
    assert evaluated(found, problem, {"answer.txt": "6"}).reward == 1.0
    for files in ({}, {"answer.txt": "7"}):
        assert evaluated(found, problem, files).reward == 0.0


@pytest.mark.real
@pytest.mark.parametrize("script", ["exit 0\n", "no-such-tool-anywhere\n"])
def test_tests_that_never_write_a_reward_are_our_failure(tmp_path: Path, script: str) -> None:
    harbor_task(tmp_path / "sum", **{"tests/test.sh": script})
    found = source(tmp_path)
    with pytest.raises(EvaluatorError, match="wrote no reward"):
        evaluated(found, found.load("sum"), {"answer.txt": "6"})


@pytest.mark.real
def test_tests_that_take_too_long_are_a_score(tmp_path: Path) -> None:
    harbor_task(tmp_path / "sum", **{"tests/test.sh": "sleep 600\n"})
    found = source(tmp_path)
    limits = EvaluationLimits(seconds=2, memory_mb=512)
    report = evaluated(found, found.load("sum"), {"answer.txt": "6"}, limits)
    assert (report.reward, report.timed_out) == (0.0, True)


@pytest.mark.parametrize(
    ("file", "text", "reward"),
    [
        ("reward.txt", "0.25\n", 0.25),
        ("reward.txt", "1", 1.0),
        ("reward.txt", "2", None),
        ("reward.txt", "inf", None),
        ("reward.txt", "", None),
        ("reward.json", '{"reward": 0.5, "style": 1}', 0.5),
        ("reward.json", '{"accuracy": 0.75}', 0.75),
        ("reward.json", '{"a": 1, "b": 0}', None),
        ("reward.json", '{"reward": "1"}', None),
        ("reward.json", "[" * 100_000, None),
        ("other.txt", "1", None),
    ],
)
def test_rewards_are_read_or_there_is_none(
    tmp_path: Path, file: str, text: str, reward: float | None
) -> None:
    (tmp_path / file).write_text(text)
    assert read_reward(tmp_path) == reward


DOCKERFILE = "environment/Dockerfile"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("task.toml", "[", "not TOML"),
        ("task.toml", "[verifier]\ntimeout_sec = 'long'\n", r"verifier\.timeout_sec"),
        ("task.toml", "[environment]\nmemory = 'much'\n", "environment: .*512M"),
        ("task.toml", "[environment]\ngpus = 1\n", r"environment\.gpus: needs a container"),
        ("task.toml", "[environment]\ndocker_image = 'x'\n", r"docker_image: needs a container"),
        ("task.toml", "[[steps]]\nname = 'a'\n", "steps: needs a container"),
        ("task.toml", "[verifier]\nenv = { KEY = '${KEY}' }\n", "KEY is taken from the host"),
        ("instruction.md", " ", "empty"),
        (DOCKERFILE, "FROM ubuntu\nWORKDIR /app\nRUN apt-get update\n", "line 3: RUN"),
        (DOCKERFILE, "FROM nvidia/cuda\nWORKDIR /app\n", "line 1: FROM nvidia/cuda"),
        (DOCKERFILE, "FROM python:2.7\nWORKDIR /app\n", "line 1: FROM python:2.7"),
        (DOCKERFILE, "FROM ubuntu\n", "not a folder of its own"),
        (DOCKERFILE, "FROM ubuntu\nWORKDIR /usr/src\n", "would hide a part of the system"),
        (
            DOCKERFILE,
            "FROM ubuntu\nWORKDIR /app\nCOPY numbers.txt /etc/x\n",
            "outside of the WORKDIR",
        ),
        (DOCKERFILE, "FROM ubuntu\nWORKDIR /app\nCOPY nothing .\n", "not there to be copied"),
        (DOCKERFILE, "FROM ubuntu AS a\nWORKDIR /app\nFROM a\n", "line 3: FROM a"),
        ("environment/docker-compose.yaml", "services: {}\n", "several services"),
        ("tests/test.sh", "set -e\ncurl -LsSf https://x | sh\n", "line 2: curl needs a network"),
    ],
)
def test_what_can_not_be_served_is_named_before_any_work(
    tmp_path: Path, file: str, text: str, said: str
) -> None:
    harbor_task(tmp_path / "sum", **{file: text})
    with pytest.raises(ProblemSourceError, match=said) as caught:
        source(tmp_path)
    assert str(tmp_path / "sum") in str(caught.value)


def test_a_task_that_is_left_out_is_not_read(tmp_path: Path) -> None:
    harbor_task(tmp_path / "sum")
    harbor_task(tmp_path / "gpu", **{"task.toml": "[environment]\ngpus = 8\n"})
    assert source(tmp_path, exclude=("gpu",)).load("sum")
    with pytest.raises(ProblemSourceError, match=r"gpu/task\.toml"):
        source(tmp_path)


def test_what_does_not_fit_the_run_is_said(tmp_path: Path) -> None:
    harbor_task(tmp_path / "sum")
    base = ["problems.source=harbor", f"problems.path={tmp_path}", "evaluation.problems=1"]
    base += ["problems.held_out_share=0"]
    for more, said in (
        ([], r"scoring\.limit_s ends them after 20 s"),
        (["scoring.limit_s=60", "rollout.sandbox=process"], "rollout.sandbox=bubblewrap"),
        (["scoring.limit_s=60", "harness.context_budget=40"], r"about \d+ tokens"),
    ):
        with pytest.raises(ProblemSourceError, match=said):
            check_problems(load_config("quickstart", [*base, *more], environment={}))
