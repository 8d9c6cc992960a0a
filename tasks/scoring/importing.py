"""Functions of one's own, by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tasks.problems.source import EvaluatorError


def import_function(setting: str, path: str) -> Callable[..., Any]:
    """What ``module:function`` names.

    Args:
        setting: that holds the path; named in the error.

    Raises:
        EvaluatorError: no such function.
    """
    module_name, _, name = path.partition(":")
    try:
        function: object = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EvaluatorError(
            f"{setting} {path!r}: give an import path module:function; {error}"
        ) from error
    if not callable(function):
        raise EvaluatorError(f"{setting} {path!r}: not a function")
    return function
