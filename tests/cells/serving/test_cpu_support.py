"""Conditions of the stand-ins, and what a stand-in does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cells.serving.cpu_support.conditions import (
    SGLANG_VERSION,
    CpuSupportError,
    check_conditions,
)
from cells.serving.cpu_support.stand_ins import PACKAGES

ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1"}
NO_GPU = (Path("/dev/no-such-gpu"),)


def check(
    version: str = SGLANG_VERSION,
    devices: tuple[Path, ...] = NO_GPU,
    environment: dict[str, str] | None = None,
) -> None:
    check_conditions(
        version=version, devices=devices, environment=ON_CPU if environment is None else environment
    )


def test_the_known_version_without_a_gpu_is_accepted() -> None:
    check()


def test_another_version_is_refused_with_the_one_to_install() -> None:
    with pytest.raises(CpuSupportError, match=rf"0\.5\.24 .*only {SGLANG_VERSION}"):
        check(version="0.5.24")


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    with pytest.raises(CpuSupportError, match=r"nvidia0.*cells\.device to cuda"):
        check(devices=(*NO_GPU, tmp_path / "nvidia0"))


def test_the_cpu_engine_must_be_asked_for() -> None:
    with pytest.raises(CpuSupportError, match="SGLANG_USE_CPU_ENGINE"):
        check(environment={})


def run(code: str) -> str:
    """Standard output of ``code`` in a fresh interpreter: stand-ins stay in one for ever. They
    stand for a package that no machine has, and for one that every machine has."""
    begin = (
        "import cells.serving.cpu_support.stand_ins as stand_ins; "
        "from cells.serving.cpu_support.stand_ins import *; "
        "stand_ins.PACKAGES = ('no_such_kernel', 'wave'); StandInFinder.install(); "
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_a_stand_in_can_be_imported_subclassed_and_never_called() -> None:
    code = """
import no_such_kernel.flash_attn, no_such_kernel
from no_such_kernel import moe_align
class Mine(no_such_kernel.Something): pass
assert no_such_kernel.flash_attn is sys.modules["no_such_kernel.flash_attn"]
assert not hasattr(no_such_kernel, "__wrapped__")
for what in (moe_align, no_such_kernel.flash_attn.attend, Mine):
    try:
        what(1)
    except MissingKernelError as error:
        print(error)
"""
    assert run(f"exec({code!r})").splitlines() == [
        "no_such_kernel.moe_align has no implementation on a CPU",
        "no_such_kernel.flash_attn.attend has no implementation on a CPU",
        "Mine has no implementation on a CPU",
    ]


def test_real_packages_win_and_others_stay_absent() -> None:
    code = """
import wave
assert not isinstance(wave, StandInModule)
assert wave.open.__module__ == "wave"
try:
    import no_such_package
except ModuleNotFoundError as error:
    print(error.name)
StandInFinder.install()
print(sum(isinstance(finder, StandInFinder) for finder in sys.meta_path))
"""
    assert run(f"exec({code!r})").split() == ["no_such_package", "1"]


def test_the_stand_ins_are_those_that_sglang_asks_for() -> None:
    assert PACKAGES == ("sgl_kernel", "torchvision", "torchaudio")
