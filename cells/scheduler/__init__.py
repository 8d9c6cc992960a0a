"""Which cell serves and which trains: pure policies, a snapshot in and moves out.

The manager of the cells and the simulator run the same policy objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cells.scheduler.adaptive import Adaptive, Pacing
from cells.scheduler.baselines import Colocate, FixedSplit
from cells.scheduler.elastic import Elastic
from cells.scheduler.measured import GroupSeen, Measured, Ran, Shape, Spell
from cells.scheduler.pacer import Choice, Pacer, SoFar
from cells.scheduler.policy import Pipeline, Policy, PolicyError
from cells.scheduler.snapshot import (
    CellView,
    Move,
    Pace,
    Role,
    Snapshot,
    Timings,
    TrainingWork,
    VersionBounds,
)

__all__ = [
    "POLICY_NAMES",
    "Adaptive",
    "CellView",
    "Choice",
    "Colocate",
    "Elastic",
    "FixedSplit",
    "GroupSeen",
    "Measured",
    "Move",
    "Pace",
    "Pacer",
    "Pacing",
    "Pipeline",
    "Policy",
    "PolicyError",
    "Ran",
    "Role",
    "Shape",
    "Snapshot",
    "SoFar",
    "Spell",
    "Timings",
    "TrainingWork",
    "VersionBounds",
    "make_policy",
]


def _async(training_cells: int = 1) -> Policy:
    return FixedSplit(training_cells)


def _async_streaming(training_cells: int = 1) -> Policy:
    return FixedSplit(training_cells, streaming=True)


_MAKERS: Mapping[str, Callable[..., Policy]] = {
    "colocate": Colocate,
    "async": _async,
    "async_streaming": _async_streaming,
    "elastic": Elastic,
    "adaptive": Adaptive,
}

POLICY_NAMES: tuple[str, ...] = tuple(_MAKERS)


def make_policy(name: str, **settings: Any) -> Policy:
    """The policy of that name with its settings.

    `async` and `async_streaming` take `training_cells`; `elastic` takes `min_gain`, `dwell_s`
    (seconds) and `headroom` (a share), `adaptive` as well, where `min_gain` is a share; `colocate`
    takes none.

    Raises:
        PolicyError: for a name, a setting or a value that does not exist.
    """
    if name not in _MAKERS:
        raise PolicyError(f"no policy {name!r}; there are {', '.join(POLICY_NAMES)}")
    try:
        return _MAKERS[name](**settings)
    except TypeError as error:
        raise PolicyError(f"policy {name!r}: {error}") from error
