"""Writes the locks in requirements/: exact versions of every package, and the hashes of its files.

Run by ``make lock`` with the project's Python. Resolves in a fresh environment, so that nothing
installed by hand gets into a lock. The hashes are those of every file of a release at PyPI, from
uv, so that a lock holds for other versions of Python too.
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

# Resolves nothing here: it only looks up hashes, which pip can't.
UV = "uv==0.13.9"

BY_HAND = {
    "build": "What installs the rest.",
    "torch": "Its build differs between machines.",
    "engines": "Installed without what they declare; engines.in says why.",
}
"""Locks whose versions stand in a file of the same name that ends in .in."""

# In torch.in and engines.in.
PINNED_ELSEWHERE = {"torch", "sglang", "mooncake-transfer-engine"}

HEADER = """\
# {title}
# Written by `make lock`; installed with --no-deps and --require-hashes.
"""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = [
        text for text in project["project"]["dependencies"] if _name(text) not in PINNED_ELSEWHERE
    ]
    tools = project["dependency-groups"]["dev"]
    with tempfile.TemporaryDirectory(prefix="gyre-lock-") as folder:
        python = _environment(Path(folder))
        _pip(python, "-r", str(REQUIREMENTS / "build.in"))
        _pip(
            python,
            *declared,
            *("-r", str(REQUIREMENTS / "sglang-cpu.in")),
            *_pins(REQUIREMENTS / "torch.in"),
        )
        locked = _freeze(python)
        constraints = Path(folder) / "locked.txt"
        constraints.write_text("\n".join(locked), encoding="utf-8")
        _pip(python, *tools, "-c", str(constraints))
        added = [line for line in _freeze(python) if line not in locked]
        _pip(python, UV)
        _write("cpu", "All that Gyre needs on a machine without a GPU.", _hashed(python, locked))
        _write("dev", "Tools of the tests and checks.", _hashed(python, added))
        for name, title in BY_HAND.items():
            source = REQUIREMENTS / f"{name}.in"
            _write(name, title, _hashed(python, _pins(source)))
    print(f"locked {len(locked)} packages and {len(added)} tools")


def _pins(source: Path) -> list[str]:
    """The lines of a file without comments."""
    lines = source.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _hashed(python: Path, pins: Sequence[str]) -> list[str]:
    """The pins with the hashes of all files of each release."""
    command = [str(python), "-m", "uv", "--no-config", "pip", "compile", "--quiet", "--no-deps"]
    command += ["--universal", "--generate-hashes", "--no-annotate", "--no-header", "-"]
    return _run(command, given="\n".join(pins)).splitlines()


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


def _run(command: Sequence[str], given: str = "") -> str:
    done = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(command)}")
    return done.stdout


def _write(name: str, title: str, lines: list[str]) -> None:
    text = HEADER.format(title=title) + "\n".join(lines) + "\n"
    (REQUIREMENTS / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
