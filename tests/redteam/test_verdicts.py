"""Attacks on the verdict: what lies in a workspace can't make its tests pass, fail to be scored, or
outlive them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from storage.records import Scored
from tests.redteam.conftest import Task

pytestmark = pytest.mark.real

FORGE = """
import builtins, gc, json, os, sys
class Same:
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return '[]'
class Int(int):
    def __eq__(self, other): return True
    def __repr__(self): return '0'
"""

PYTEST_FORGE = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = 'passed'
def pytest_collection_modifyitems(items): items.clear()
"""

PATCH_PYTEST = """
import sys
try:
    import _pytest.runner, _pytest.assertion
    _pytest.runner.CallInfo.excinfo = None
    _pytest.runner.pytest_runtest_call = lambda item: None
except ImportError:
    pass
"""

REPORT = """<testsuites><testsuite tests="4" failures="0">{cases}</testsuite></testsuites>"""

# Each is put in front of functions that return the wrong value, at import of the agent's module.
AT_IMPORT: dict[str, str] = {
    "exit": "import os; os._exit(0)",
    "exit-code-of-success": "raise SystemExit(0)",
    "atexit": "import atexit, os; atexit.register(lambda: os._exit(0))",
    "keyboard-interrupt": "raise KeyboardInterrupt",
    "patched-pytest": PATCH_PYTEST,
    "patched-json": "import json; json.dumps = lambda *a, **k: 'same'; json.loads = json.dumps",
    "patched-builtins": "import builtins; builtins.repr = lambda x: 'same'; builtins.all = any",
    "replies-forged": (
        "import os\n"
        "for number in range(3, 64):\n"
        "    try: os.write(number, b'{\"values\": [1, 2, 3, 4, 5, 6, 7, 8]}\\n' * 50)\n"
        "    except OSError: pass"
    ),
    "output-forged": "print('4 passed in 0.01s' * 3, flush=True)",
    "reports-forged": (
        "import pathlib\n"
        "for folder in ('.', '..', '/tmp', '/workspace'):\n"
        "    for name in ('report.xml', 'junit.xml', 'result.json', 'reward.txt'):\n"
        "        try: pathlib.Path(folder, name).write_text('1')\n"
        "        except OSError: pass"
    ),
    "signal-to-parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "signal-to-all": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "tests-sought-in-memory": (
        "import gc, sys\n"
        "frames = [sys._getframe(n) for n in range(4)]\n"
        "found = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
        "if found: print(found)"
    ),
    "tests-sought-on-disk": (
        "import glob\n"
        "found = glob.glob('/tmp/gyre-*') + glob.glob('/tmp/**/test_*.py', recursive=True)\n"
        "assert not found"
    ),
    "hang": "import time; time.sleep(3600)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "fork-bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": (
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    ),
    "disk": (
        "import itertools\n"
        "for n in itertools.count():\n"
        "    with open(f'/tmp/f{n}', 'wb') as f: f.write(bytes(1 << 24))"
    ),
    "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "output-flood": "import os\nwhile True: os.write(1, bytes(1 << 16))",
}


def wrong(task: Task, value: str = "None") -> str:
    return "".join(f"def {name}(x):\n    return {value}\n" for name in task.names)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


Judge = Callable[[Path], Scored]


def test_an_honest_solution_passes(task: Task, judge: Judge, workspace: Path) -> None:
    assert judge(write(workspace, {task.path: task.solution})).reward == 1.0


UNDER_PYTEST = ("exit", "patched-pytest", "replies-forged", "output-forged", "reports-forged")
UNDER_PYTEST += ("tests-sought-on-disk", "fork-bomb")
LIGHT, PYTEST = 8, 0


@pytest.mark.parametrize(
    ("task", "name"),
    [*((LIGHT, name) for name in AT_IMPORT), *((PYTEST, name) for name in UNDER_PYTEST)],
    indirect=["task"],
)
def test_nothing_at_import_helps(name: str, task: Task, judge: Judge, workspace: Path) -> None:
    judged = judge(write(workspace, {task.path: f"{AT_IMPORT[name]}\n{wrong(task)}"}))
    assert (judged.reward, judged.tests_total) == (0.0, 4)


PLANTED: dict[str, dict[str, str]] = {
    "conftest": {"conftest.py": PYTEST_FORGE, "tests/conftest.py": PYTEST_FORGE},
    "sitecustomize": {"sitecustomize.py": PATCH_PYTEST, "usercustomize.py": PATCH_PYTEST},
    "pth": {
        "evil.pth": "import os; os._exit(0)",
        "lib/python3.11/site-packages/evil.pth": "import os; os._exit(0)",
    },
    "settings": {
        "pytest.ini": "[pytest]\naddopts = -p evil --co\n",
        "setup.cfg": "[tool:pytest]\naddopts = --co\n",
        "tox.ini": "[pytest]\naddopts = --co\n",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--co'\n",
        "evil.py": PYTEST_FORGE,
    },
    "standard-library": {
        f"{name}.py": "import sys\nraise SystemExit(0)"
        for name in ("json", "os", "sys", "pytest", "resource", "io", "_json", "typing")
    },
    "reports": {
        "report.xml": REPORT.format(cases='<testcase name="a"/>' * 4),
        "OutOfTimeError": "",
        "EvaluatorError": "ours",
        "reward.txt": "1.0",
    },
    "edited-tests": {
        "test_00.py": "def test_all(): pass\n",
        "tests/test_00.py": "def test_all(): pass\n",
        "setup.json": "{}",
    },
}


@pytest.mark.parametrize("name", PLANTED)
def test_nothing_that_is_planted_helps_or_hurts(
    name: str, task: Task, judge: Judge, workspace: Path
) -> None:
    """Neither does it make a wrong package pass, nor a right one fail to be scored."""
    write(workspace, PLANTED[name])
    assert judge(write(workspace, {task.path: wrong(task)})).reward == 0.0


@pytest.mark.parametrize("value", ["Same()", "Int()", "[Same()]", "float('nan')", "x"])
def test_values_that_claim_to_be_equal_are_not(
    value: str, task: Task, judge: Judge, workspace: Path
) -> None:
    assert judge(write(workspace, {task.path: FORGE + wrong(task, value)})).reward == 0.0


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_modules_that_are_no_files(task: Task, judge: Judge, workspace: Path) -> None:
    path = workspace / task.path
    for make in (
        lambda: _link(path, "/dev/zero"),
        lambda: _link(path, "../" * 8 + "etc/passwd"),
        lambda: _link(path, path.name),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        make()
        assert judge(workspace).reward == 0.0
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_strange_names_do_not_stop_the_evaluation(
    task: Task, judge: Judge, workspace: Path
) -> None:
    write(workspace, {task.path: task.solution})
    for name in (b"new\nline.py", b"\xff\xfe.py", b"\x1b[31m", b"-rf", b" ", b"a" * 255, b"\\"):
        (workspace / os.fsdecode(name)).write_text("x")
    deep = workspace
    for _ in range(200):
        deep = deep / "deep"
    deep.mkdir(parents=True)
    (workspace / "shut").mkdir()
    (workspace / "shut").chmod(0)
    assert judge(workspace).reward == 1.0


def test_a_daemon_does_not_outlive_its_evaluation(
    task: Task, judge: Judge, workspace: Path
) -> None:
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.execv('/bin/sleep', ['sleep', '86397'])\n"
    )
    assert judge(write(workspace, {task.path: f"{daemon}{task.solution}"})).reward == 1.0
    deadline = time.monotonic() + 20
    while _sleepers("86397"):
        assert time.monotonic() < deadline, "a process has outlived the evaluation"
        time.sleep(0.02)


def _sleepers(argument: str) -> list[int]:
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if (one.info["cmdline"] or [])[-1:] == [argument]]
