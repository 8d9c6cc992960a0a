"""The locks are complete: what the tree declares and imports is installed as pinned."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "cells", "storage", "configs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DECLARED = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
TOOLS = [Requirement(text) for text in PROJECT["dependency-groups"]["dev"]]

REPLACED = {"mooncake-transfer-engine": "mooncake-transfer-engine-non-cuda"}
"""What a machine without a GPU installs in place of a declared dependency."""

INCOMPLETE = {"sglang", "gyre-rl"}
"""Installed without some of their dependencies; requirements/engines.txt says why."""


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    heads = [line.removesuffix(" \\") for line in lines if line and line[0] not in "# "]
    pins = [head.split("==") for head in heads]
    assert all(len(pin) == 2 for pin in pins), f"{name} holds a line that is no exact version"
    return {canonicalize_name(pin[0]): pin[1] for pin in pins}


FILES = ("build.txt", "torch.txt", "cpu.txt", "engines.txt", "dev.txt")
LOCKED = {name: pin for file in FILES for name, pin in _pins(file).items()}


@pytest.mark.parametrize("requirement", [*DECLARED, *TOOLS], ids=str)
def test_declared_dependency_is_locked_within_its_bounds(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    pin = LOCKED[REPLACED.get(name, name)]
    assert requirement.specifier.contains(pin, prereleases=True)


def test_what_is_locked_is_installed() -> None:
    wrong: list[str] = []
    for name, pin in LOCKED.items():
        try:
            found = version(name).partition("+")[0]
        except PackageNotFoundError:
            found = "nothing"
        if found != pin:
            wrong.append(f"{name}: {pin} is locked, {found} is installed")
    assert not wrong, wrong


@pytest.mark.parametrize("name", [*FILES, "torch-cpu.txt"])
def test_every_pin_has_hashes(name: str) -> None:
    pin, without = "", set()
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "# ":
            pin = line
            without.add(pin)
        elif re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", line):
            without.discard(pin)
        else:
            assert line.startswith("#"), f"{name}: {line}"
    assert not without


@pytest.mark.parametrize("name", ["build", "torch", "engines"])
def test_pins_made_by_hand_are_those_of_the_lock(name: str) -> None:
    """`make lock` writes the second from the first; an index may name them in any order."""
    lines = (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines()
    pins = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert sorted(pins) == sorted(f"{pin}=={of}" for pin, of in _pins(f"{name}.txt").items())


@pytest.mark.parametrize("option", [*FILES, "torch-cpu.txt"])
def test_set_up_installs_no_lock_without_its_hashes(option: str) -> None:
    text = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    uses = [line for line in text.splitlines() if f"-r requirements/{option}" in line]
    assert uses and all("pip_locked" in line for line in uses)
    assert "--require-hashes --no-deps" in text


def test_both_builds_of_torch_are_one_release() -> None:
    assert _pins("torch-cpu.txt")["torch"].partition("+")[0] == _pins("torch.txt")["torch"]


def test_locks_share_no_package() -> None:
    assert sum(len(_pins(file)) for file in FILES) == len(LOCKED)


def test_installed_packages_have_what_they_need() -> None:
    installed = {
        canonicalize_name(found.metadata["Name"]): found
        for found in distributions()
        if found.metadata["Name"]
    }
    missing: list[str] = []
    for name in sorted(set(LOCKED) - INCOMPLETE):
        for text in installed[name].requires or []:
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            found = installed.get(canonicalize_name(need.name))
            if found is None or not need.specifier.contains(found.version, prereleases=True):
                missing.append(f"{name} needs {text}")
    assert not missing, missing


def test_everything_imported_is_installed() -> None:
    missing = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in (*PACKAGES, "tests", "scripts")
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in sorted(_imported(path) - sys.stdlib_module_names - set(PACKAGES))
        if name != "tests" and importlib.util.find_spec(name) is None
    ]
    # Stand-ins for what SGLang imports on a GPU are made at run time.
    assert not [line for line in missing if not _STAND_IN.search(line)], missing


_STAND_IN = re.compile(r"imports (sgl_kernel|torchvision|torchaudio)$")


def _imported(path: Path) -> set[str]:
    """Top-level names that a file imports absolutely."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names
