"""Losses of one sample. Replicas load them by import path; each takes an ``ObjectiveConfig``."""

from __future__ import annotations

_HERE = "tasks.training.objectives"
_BUILT_IN = {
    "gspo": f"{_HERE}.gspo:GSPO",
    "gspo_token": f"{_HERE}.gspo_token:GSPOToken",
    "grpo": f"{_HERE}.grpo:GRPO",
    "dapo": f"{_HERE}.dapo:DAPO",
    "tis": f"{_HERE}.tis:TruncatedImportance",
}


class UnknownObjectiveError(ValueError):
    """No such objective; the text says what is allowed."""


def objective_path(name: str) -> str:
    """The import path module:Class of a built-in name, or ``name`` itself when it is one.

    Raises:
        UnknownObjectiveError: neither.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module, separator, attribute = name.partition(":")
    if not separator or not module or not attribute:
        allowed = ", ".join(sorted(_BUILT_IN))
        raise UnknownObjectiveError(
            f"training.objective.name {name!r}: give {allowed}, or an import path module:Class"
        )
    return name
