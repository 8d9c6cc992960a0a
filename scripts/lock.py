"""Writes requirements/cpu.txt and requirements/dev.txt: every package with its exact version.

Run by ``make lock`` with the project's Python. Resolves in a fresh environment, so that nothing
installed by hand gets into a lock.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LIMIT_S = 1800

# Installed by torch.txt and engines.txt, which pin them by hand.
PINNED_ELSEWHERE = {"torch", "sglang", "mooncake-transfer-engine"}

HEADER = """\
# {title}
# Written by `make lock`; installed with --no-deps, so nothing here is resolved again.
"""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = [
        text for text in project["project"]["dependencies"] if _name(text) not in PINNED_ELSEWHERE
    ]
    tools = project["dependency-groups"]["dev"]
    with tempfile.TemporaryDirectory(prefix="gyre-lock-") as folder:
        python = _environment(Path(folder))
        _pip(python, "-r", str(REQUIREMENTS / "build.txt"))
        _pip(
            python,
            *declared,
            *("-r", str(REQUIREMENTS / "sglang-cpu.in")),
            *("-r", str(REQUIREMENTS / "torch.txt")),
        )
        locked = _freeze(python)
        lock = REQUIREMENTS / "cpu.txt"
        _write(lock, "All that Gyre needs on a machine without a GPU.", locked)
        _pip(python, *tools, "-c", str(lock))
        added = [line for line in _freeze(python) if line not in locked]
        _write(REQUIREMENTS / "dev.txt", "Tools of the tests and checks.", added)
    print(f"locked {len(locked)} packages and {len(added)} tools")


def _name(requirement: str) -> str:
    """The distribution's name in its canonical form."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def _environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def _pip(python: Path, *arguments: str) -> None:
    print("pip install", *arguments, flush=True)
    _run([str(python), "-m", "pip", "install", "-q", "--no-input", "--no-compile", *arguments])


def _freeze(python: Path) -> list[str]:
    """``name==version`` lines without what is pinned elsewhere."""
    output = _run([str(python), "-m", "pip", "freeze"])
    skipped = PINNED_ELSEWHERE | {"pip", "setuptools", "wheel"}
    return [line for line in output.splitlines() if _name(line) not in skipped]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(command)}")
    return done.stdout


def _write(path: Path, title: str, lines: list[str]) -> None:
    path.write_text(HEADER.format(title=title) + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
