"""Empty packages in place of those that SGLang only needs on a GPU or for images and sound.

- ``sgl_kernel``: CUDA kernels (and AMX kernels on some CPUs). With the ``torch_native`` attention
  and ``pytorch`` sampling back ends none of them is called.
- ``torchvision``, ``torchaudio``: loaders of multimodal models. Their own wheels must match torch
  to the build; a text policy never calls them.

A stand-in has every attribute that is asked for: an empty class, so that it can be a base class, a
decorator's argument or an annotation at import time. Calling a stand-in's function raises, so a
kernel that is needed after all is an error with its name and never a silent wrong result.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

PACKAGES = ("sgl_kernel", "torchvision", "torchaudio")


class MissingKernelError(NotImplementedError):
    """Something of a stand-in was called."""


class _StandInType(type):
    """Metaclass: attributes of a stand-in are stand-ins too, except Python's own protocols."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise MissingKernelError(f"{cls.__qualname__} has no implementation on a CPU")


def _stand_in(name: str) -> type:
    return _StandInType(name, (), {})


class StandInModule(types.ModuleType):
    """A module that has everything."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        loaded = sys.modules.get(f"{self.__name__}.{name}")
        if loaded is not None:
            return loaded
        value = _stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins. Last in ``sys.meta_path``, so that a real package wins."""

    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StandInModule(spec.name)
        module.__dict__["__version__"] = "0.0.0"
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: a stand-in has no code."""
