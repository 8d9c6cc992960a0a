"""Where the stand-ins may be used: one version of SGLang, and no GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

SGLANG_VERSION = "0.5.23"

GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Device files of NVIDIA's and AMD's drivers. Asking torch would cost seconds in each process."""


class CpuSupportError(RuntimeError):
    """The stand-ins don't fit this installation; the text says why and what to do."""


def check_conditions(
    *,
    version: str | None = None,
    devices: tuple[Path, ...] = GPU_DEVICES,
    environment: Mapping[str, str] | None = None,
) -> None:
    """See that stand-ins are right here.

    Args:
        version: of SGLang; what is installed when left out.
        devices: files whose presence means a GPU.
        environment: ``os.environ`` when left out. ``SGLANG_USE_CPU_ENGINE`` must be 1: without it
            SGLang asks for a GPU's libraries even with ``--device cpu``.

    Raises:
        CpuSupportError: another version, a GPU, or the variable is not set.
    """
    if version is None:
        try:
            version = metadata.version("sglang")
        except metadata.PackageNotFoundError:
            raise CpuSupportError(
                f"SGLang is not installed: pip install --no-deps sglang=={SGLANG_VERSION}"
            ) from None
    if version != SGLANG_VERSION:
        raise CpuSupportError(
            f"SGLang {version} was not seen to run on a CPU with these stand-ins, only "
            f"{SGLANG_VERSION}: install that one, or set cells.device to cuda on a machine with "
            f"GPUs"
        )
    found = [str(device) for device in devices if device.exists()]
    if found:
        raise CpuSupportError(
            f"this machine has a GPU ({', '.join(found)}): stand-ins would hide its libraries; "
            f"set cells.device to cuda"
        )
    if (os.environ if environment is None else environment).get("SGLANG_USE_CPU_ENGINE") != "1":
        raise CpuSupportError("SGLANG_USE_CPU_ENGINE must be 1 where SGLang runs on a CPU")
