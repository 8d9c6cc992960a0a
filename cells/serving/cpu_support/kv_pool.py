"""What SGLang's hierarchical KV cache takes from CUDA, for a machine without it.

Three of its modules are changed right after they are loaded. Seen to work with SGLang 0.5.23, with
the io backend ``direct`` and the memory layout ``page_first_direct``:

- ``pool_host.base``: host memory is not pinned; there is no device to copy it to asynchronously.
- ``pool_host.common``: host memory is not registered with CUDA.
- ``pool_host.mha``: pages are copied between the engine's cache and host memory by torch, where
  ``sgl_kernel`` has a CUDA kernel.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this is imported by processes that never need it
    import torch

_PACKAGE = "sglang.srt.mem_cache.pool_host"


def _host_to_device(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy token slots of one layer, keys and values each.

    Shapes: host [pages, layers, page_size, heads, width], device [slots, heads, width]; the indices
    are of tokens on both sides.
    """
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        pages, places = src_indices // page_size, src_indices % page_size
        device[dst_indices] = host[pages, layer_id, places].to(device.dtype)


def _device_to_host(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy token slots of all layers; ``src_ptrs`` are the keys of each layer, then the values."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages, places = dst_indices // page_size, dst_indices % page_size
    for number, device in enumerate(src_ptrs):
        kind, layer = divmod(number, layers)
        host = dst_ptrs[kind]
        host[pages, layer, places] = device[src_indices].to(host.dtype)


def _never_pinned(base: types.ModuleType) -> None:
    base.HostKVCache.pin_memory = property(lambda _: False, lambda _, value: None)


def _not_registered(common: types.ModuleType) -> None:
    def nothing(*args: Any, **kwargs: Any) -> None:
        """There is no CUDA to register with."""

    common._cuda_host_register = nothing  # type: ignore[attr-defined]


def _copied_by_torch(mha: types.ModuleType) -> None:
    mha.transfer_kv_per_layer_direct_pf_lf = _host_to_device  # type: ignore[attr-defined]
    mha.transfer_kv_all_layer_direct_lf_pf = _device_to_host  # type: ignore[attr-defined]


_CHANGES: dict[str, Callable[[types.ModuleType], None]] = {
    f"{_PACKAGE}.base": _never_pinned,
    f"{_PACKAGE}.common": _not_registered,
    f"{_PACKAGE}.mha": _copied_by_torch,
}


class _Changing(importlib.abc.Loader):
    """A module's own loader, and the change after it."""

    def __init__(self, own: importlib.abc.Loader, change: Callable[[types.ModuleType], None]):
        self._own = own
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._own.exec_module(module)
        self._change(module)


class KvPoolFinder(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed."""

    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, _CHANGES[fullname])
        return spec
