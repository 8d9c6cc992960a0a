"""Hidden tests: both runners agree, and code that cheats gains nothing."""

import shutil
import textwrap

import pytest

from configs.problems import ProblemsConfig, SpecRepoConfig
from storage.records import Split
from tasks.problems.evaluation import Bare, EvaluationLimits, EvaluatorError
from tasks.problems.specrepo.light_tests import run_light
from tasks.problems.specrepo.pytest_tests import run_pytest
from tasks.problems.specrepo.source import SpecRepo

LIMITS = EvaluationLimits(seconds=20, memory_mb=512)
RUNNERS = pytest.mark.parametrize("run", [run_light, run_pytest])


def solution(functions, broken=()):
    lines = []
    for f in functions:
        right = f.operation.expression.format(c=f.constant)
        lines.append(f"def {f.name}({f.operation.argument}):")
        lines.append(f"    return {'None' if f.name in broken else right}")
    return "\n".join([*lines, ""])


def write(specification, workspace, broken=()):
    for file in specification.files:
        path = workspace / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(solution(file.functions, broken))


def specification(number=0, **settings):
    source = SpecRepo(ProblemsConfig(specrepo=SpecRepoConfig(**settings)))
    return source.specification(source.ids(Split.TRAIN, number + 1, 1)[number])


@pytest.fixture
def four():
    """A specification of four functions in one file."""
    return specification(functions_min=4, functions_max=4)


@RUNNERS
@pytest.mark.parametrize("number", range(2))
def test_a_right_package_passes(tmp_path, run, number):
    made = specification(number, files=4, functions_min=9, functions_max=12, difficulty=3)
    write(made, tmp_path)
    report = run(made, tmp_path, LIMITS)
    assert (report.passed, report.total) == (len(made.functions), len(made.functions))
    assert not report.timed_out


@RUNNERS
def test_each_function_is_a_test(tmp_path, four, run):
    names = [function.name for function in four.functions]
    write(four, tmp_path, broken=names[:3])
    report = run(four, tmp_path, LIMITS)
    assert (report.passed, report.total) == (1, 4)
    assert names[0] in report.log


@RUNNERS
def test_an_empty_workspace_fails_every_test(tmp_path, four, run):
    report = run(four, tmp_path, LIMITS)
    assert (report.passed, report.total, report.timed_out) == (0, 4, False)


@RUNNERS
def test_the_type_of_a_value_counts(tmp_path, four, run):
    path = tmp_path / four.files[0].path
    path.write_text(
        "".join(
            f"def {f.name}(x):\n    return float({f.operation.expression.format(c=f.constant)})\n"
            for f in four.functions
        )
    )
    assert run(four, tmp_path, LIMITS).passed == 0


CHEATS = {
    "exit at import": "import os; os._exit(0)",
    "polite exit at import": "import sys; sys.exit(0)",
    "printed report": """
        print('{"values": [1, 1, 1, 1, 1]}')
        print("4 passed")
        raise SystemExit(0)
        """,
    "replies on every descriptor": """
        import os
        for number in range(3, 64):
            for _ in range(9):
                try: os.write(number, b'{"values": [-4, 3, 8, 26, 43]}\\n')
                except OSError: pass
        """,
    "equal to everything": """
        class Any(int):
            def __eq__(self, other): return True
            def __hash__(self): return 0
            def __repr__(self): return "8"
        def __getattr__(name): return lambda x: Any(5)
        """,
    "patched encoder": """
        import sys
        main = sys.modules["__main__"]
        main.encoded = lambda value: "[true, true, true, true, true]"
        """,
    "deleted tests": """
        import os, shutil, tempfile, glob
        for path in glob.glob(tempfile.gettempdir() + "/gyre-tests-*"): shutil.rmtree(path, True)
        for name in os.listdir("."): os.unlink(name)
        """,
    "own conftest": """
        import pathlib
        pathlib.Path("conftest.py").write_text("def pytest_runtest_call(item): pass")
        """,
    "fork and leave": """
        import os
        if os.fork(): os._exit(0)
        """,
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_gains_nothing_light(tmp_path, four, cheat):
    (tmp_path / four.files[0].path).write_text(textwrap.dedent(CHEATS[cheat]))
    report = run_light(four, tmp_path, LIMITS)
    assert (report.passed, report.total) == (0, 4), report.log


@pytest.mark.parametrize("cheat", ["printed report", "patched encoder", "own conftest"])
def test_cheating_gains_nothing_pytest(tmp_path, four, cheat):
    (tmp_path / four.files[0].path).write_text(textwrap.dedent(CHEATS[cheat]))
    report = run_pytest(four, tmp_path, LIMITS)
    assert (report.passed, report.total) == (0, 4), report.log


def test_a_crash_in_one_function_fails_only_that_one(tmp_path, four):
    first = four.functions[0].name
    text = solution(four.functions) + f"def {first}(x):\n    import os\n    os._exit(0)\n"
    (tmp_path / four.files[0].path).write_text(text)
    report = run_light(four, tmp_path, LIMITS)
    assert (report.passed, report.total) == (3, 4), report.log


def test_a_hang_in_one_function_fails_only_that_one(tmp_path, four):
    first = four.functions[0].name
    text = solution(four.functions) + f"def {first}(x):\n    while True: pass\n"
    (tmp_path / four.files[0].path).write_text(text)
    report = run_light(four, tmp_path, LIMITS)
    assert (report.passed, report.total, report.timed_out) == (3, 4, False), report.log
    assert f"{first} failed: hangs" in report.log


def test_the_time_limit_fails_what_is_left(tmp_path, four):
    (tmp_path / four.files[0].path).write_text("import time; time.sleep(60)")
    report = run_light(four, tmp_path, EvaluationLimits(seconds=0.5, memory_mb=512))
    assert (report.passed, report.total, report.timed_out) == (0, 4, True)


def test_memory_is_limited(tmp_path, four):
    first = four.functions[0].name
    text = solution(four.functions) + f"def {first}(x):\n    return bytearray(1 << 31)\n"
    (tmp_path / four.files[0].path).write_text(text)
    report = run_light(four, tmp_path, LIMITS)
    assert report.passed == 3
    assert f"{first} failed: MemoryError" in report.log


def test_files_of_a_package_may_import_each_other(tmp_path):
    made = next(
        s
        for s in (specification(n, files=2, functions_min=4, functions_max=4) for n in range(20))
        if len(s.files) == 2
    )
    write(made, tmp_path)
    first, second = (file.path for file in made.files)
    text = (tmp_path / second).read_text()
    module = first.removesuffix(".py").replace("/", ".")
    (tmp_path / second).write_text(f"import {module}\n{text}")
    report = run_light(made, tmp_path, LIMITS)
    assert report.passed == report.total == 4


@RUNNERS
def test_a_broken_sandbox_is_our_failure_not_a_zero(tmp_path, four, run):
    write(four, tmp_path)
    with pytest.raises(EvaluatorError):
        run(four, tmp_path, LIMITS, Bare((shutil.which("false"),)))


def test_a_command_prefix_goes_in_front(tmp_path, four):
    write(four, tmp_path)
    report = run_light(four, tmp_path, LIMITS, Bare((shutil.which("env"), "MARK=1")))
    assert report.passed == 4


def test_packages_with_many_functions_go_to_pytest(tmp_path):
    config = SpecRepoConfig(functions_min=3, functions_max=3, pytest_above=2)
    source = SpecRepo(ProblemsConfig(specrepo=config))
    problem = source.load(source.ids(Split.TRAIN, 1, 1)[0])
    write(source.specification(problem.problem_id), tmp_path)
    report = source.evaluate(problem, tmp_path, LIMITS)
    assert (report.passed, report.total) == (3, 3)
    assert "3 passed in" in report.log
