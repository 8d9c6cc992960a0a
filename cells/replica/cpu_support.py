"""What Megatron-core 0.16 needs from ``torch.cuda`` where there is none.

These stand-ins are enough with our own core attention:

- ``torch.cuda.current_device``. The vocabulary embedding and the rotary embedding ask it where to
  put their tensors, also when ``use_cpu_initialization`` is set. It answers "cpu".
- ``Tensor.cuda``. The copy of a tied embedding in the last pipeline stage is moved with it.
- ``torch.compile``, only while Megatron is imported. Megatron decorates its fused kernels with it
  at import, which loads the whole compiler (10 s of CPU time) for kernels that our settings turn
  off. The undecorated functions are the same mathematics.
- In Megatron itself (``install_in_megatron``): the pipeline schedule counts tokens in a tensor that
  it makes on "cuda" by name; and sequence parallelism and recomputation keep a random state of the
  GPU, of which nothing in our models makes use: no dropout, and weights are loaded.

On a GPU this module changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    torch.Tensor.cuda = _itself


def install_in_megatron() -> None:
    """The stand-ins inside Megatron-core; again is harmless. With a GPU only the last one, which is
    wanted wherever Transformer Engine is not installed."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # asked for, and defined only with Transformer Engine
    if torch.cuda.is_available():
        return
    schedules.torch = _TorchOnCpu()
    random._CUDA_RNG_STATE_TRACKER = _NoRandomness()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    random._set_cuda_rng_state = lambda *_, **__: None


class _TorchOnCpu:
    """torch, for a module that makes tensors on "cuda" by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **{**options, "device": "cpu"})


class _NoRandomness:
    """Random states of a GPU, where there is none and nobody draws."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        pass

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()


def _cpu() -> torch.device:
    return torch.device("cpu")


def _itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    if function is None:
        return lambda given: given
    return function
