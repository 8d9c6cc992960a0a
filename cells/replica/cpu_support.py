"""What Megatron-core 0.16 needs from ``torch.cuda`` where there is none.

Two stand-ins are enough for a dense model with our own core attention:

- ``torch.cuda.current_device``. The vocabulary embedding and the rotary embedding ask it where to
  put their tensors, also when ``use_cpu_initialization`` is set. It answers "cpu".
- ``torch.compile``, only while Megatron is imported. Megatron decorates its fused kernels with it
  at import, which loads the whole compiler (10 s of CPU time) for kernels that our settings turn
  off. The undecorated functions are the same mathematics.

On a GPU this module changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

MEGATRON_SERIES = "0.16."


class CpuSupportError(RuntimeError):
    """The stand-ins don't fit this installation."""


@contextmanager
def megatron_imports() -> Iterator[None]:
    """Import Megatron inside this: with a GPU as it is, without one with the stand-ins."""
    with warnings.catch_warnings():
        # "Apex is not installed, falling back to torch": that is what is wanted here.
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            yield
            return
        compile_ = torch.compile
        install()
        torch.compile = _uncompiled
        try:
            yield
        finally:
            torch.compile = compile_


def install() -> None:
    """Put the lasting stand-in in place; again is harmless.

    Raises:
        CpuSupportError: there is a GPU, or Megatron-core is of another series.
    """
    if torch.cuda.is_available():
        raise CpuSupportError("a GPU is present: Megatron-core must use it, not the stand-ins")
    found = version("megatron-core")
    if not found.startswith(MEGATRON_SERIES):
        raise CpuSupportError(
            f"megatron-core {found}: the stand-ins were written for {MEGATRON_SERIES}x; install "
            f"that, or run on a GPU"
        )
    torch.cuda.current_device = _cpu


def _cpu() -> torch.device:
    return torch.device("cpu")


def _uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    if function is None:
        return lambda given: given
    return function
