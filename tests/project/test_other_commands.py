"""Commands of the pages beside `gyre`: run by the file that is named, or it is said why not."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

from tests.project.test_commands import PAGES, ROOT, lines

RUN_BY = {
    "make": "tests/project/test_targets.py",
    "prefect --no-prompt deploy --all": "tests/flows/test_operated.py",
    "prefect work-pool create k8s": "tests/flows/test_operated.py",
    "prefect flow-run retry": "tests/flows/test_operated.py",
    "python scripts/smollm2.py": "tests/smollm.py",
    "prefect server": "tests/flows/test_servers.py",
    "python scripts/pictures.py": "tests/flows/test_report.py",
    "python -m prefect.engine": "tests/flows/orchestrated.py",
    "python -m pytest": "tests/project/test_targets.py",
    "python -m tests.chaos.chaos_run": "tests/chaos/test_chaos_run.py",
    "python -m cells.gateway.forks": "tests/cells/gateway/test_prefixes.py",
}
"""Beginning of a command, to the file that runs it."""
NOT_RUN = {
    "python -m tests.benchmarks": "minutes to hours; here, that they take these options",
    "python scripts/gpu_check.py": "needs a GPU",
    "python -c": "here, by itself",
    "python3.11 -m venv gpu": "the packages of a GPU",
    "pip install": "a registry; what is installed is pinned and compared by test_environment.py",
    "apt-get install": "changes the machine; here, that scripts/setup.sh does it with the same",
    "su postgres": "changes the machine's database; tests/flows/databases.py makes one of its own",
    "docker": "no container engine",
    "srun": "no Slurm",
    "tensorboard": "a package that is no part of Gyre; its files are read by test_tracking.py",
    "prefect worker start": "gyre serve starts one, in tests/flows/test_operated.py",
    "prefect work-pool create docker": "the worker of another package",
    "prefect work-pool create slurm": "as for Docker",
    "npm": "writes the locks of a harness from its registry",
}
"""Beginning of a command, to why no test runs it as it stands."""
_PROGRAMS = "make|pip|python3?|python3.11|prefect|docker|apt-get|su|srun|tensorboard|aws|npm|exec"
_COMMAND = re.compile(rf"^(?:[A-Z_]+=\S+ )*(?:exec )?(?:\.venv/bin/)?((?:{_PROGRAMS}) .+)$")
_SPAN = re.compile(rf"`(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?((?:{_PROGRAMS}) [^`]+)`")


def others(text: str) -> Iterator[str]:
    """Commands of a page's code blocks and code spans, each line's parts by themselves."""
    for block, line in lines(text):
        if block:
            for part in re.split(r"; | && | & ", line.strip()):
                if found := _COMMAND.match(part):
                    yield found.group(1)
        else:
            yield from (found.group(1) for found in _SPAN.finditer(line))


FOUND = sorted({(page.name, one) for page in PAGES for one in others(page.read_text("utf-8"))})


@pytest.mark.parametrize(("page", "command"), FOUND, ids=[": ".join(one) for one in FOUND])
def test_a_command_is_run_or_it_is_said_why_not(page: str, command: str) -> None:
    plain = command.replace("python3 ", "python ")
    known = [one for one in (*RUN_BY, *NOT_RUN) if f"{plain} ".startswith(f"{one} ".rstrip())]
    assert known, f"{page}: {command}"
    for one in known:
        if file := RUN_BY.get(one):
            text = (ROOT / file).read_text("utf-8")
            last = one.split()[-1].rsplit("/", 1)[-1]
            assert re.search(rf"{re.escape(last)}\b", text), f"{file} does not run {one}"


def test_the_line_of_python_prints_what_it_is_about() -> None:
    (line,) = re.findall(r'^    python -c "(.*)"$', (ROOT / "docs/sandboxes.md").read_text(), re.M)
    done = subprocess.run(
        [sys.executable, "-c", line],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_extras_that_pages_install_are_there() -> None:
    named = {extra for _, one in FOUND for extra in re.findall(r"gyre-rl\[(\w+)\]", one)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert named == set(project["optional-dependencies"])


@pytest.mark.parametrize("package", ["postgresql", "redis-server", "npm"])
def test_packages_of_debian_that_pages_install_are_those_of_the_set_up(package: str) -> None:
    assert any(f" {package}" in one for _, one in FOUND if one.startswith("apt-get install"))
    assert re.search(rf"echo {package}\b", (ROOT / "scripts/setup.sh").read_text("utf-8"))


BENCHMARKS = sorted({one for _, one in FOUND if one.startswith("python -m tests.benchmarks")})


@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_benchmark_takes_the_options_that_it_is_given(command: str) -> None:
    words = re.split(r"\s#\s", command)[0].split()
    folder = ROOT / "tests" / "benchmarks"
    source = (folder / f"{words[2].rsplit('.', 1)[-1]}.py").read_text("utf-8")
    source += (folder / "trained.py").read_text("utf-8")
    for option in (word.partition("=")[0] for word in words[3:] if word.startswith("--")):
        assert f'"{option}"' in source, f"{command}: {option}"
