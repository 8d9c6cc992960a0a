"""The wheel holds the whole product and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "cells", "storage", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of the files that git knows, built in a copy."""
    copy = tmp_path_factory.mktemp("source")
    for name in _tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(out), str(copy)]
    subprocess.run(command, check=True, timeout=240)
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def _tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES, "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    return [name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_it_holds_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    expected = {name for name in _tracked() if name.startswith(PACKAGES)}
    assert expected - set(wheel.namelist()) == set()


def test_it_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_it_names_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = {Path(name).name: name for name in wheel.namelist()}
    assert b"gyre = flows.cli:main" in wheel.read(names["entry_points.txt"])
    assert b"Apache License" in wheel.read(names["LICENSE"])
    metadata = wheel.read(names["METADATA"]).decode()
    assert "\nName: gyre-rl\n" in metadata
    for line in ("prefect", "sglang", "megatron-core", "mooncake-transfer-engine", "torch"):
        assert f"\nRequires-Dist: {line}" in metadata
