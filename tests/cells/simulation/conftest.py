"""A workload small enough that a whole run takes a fraction of a second."""

from __future__ import annotations

from typing import Any

import pytest

from cells.simulation.workload import Workload

_VALUES: dict[str, dict[str, Any]] = {
    "durations": {"median_s": 1000.0, "sigma_query": 0.4, "sigma_execution": 0.5},
    "execution": {
        "timeout_s": 4000.0,
        "block_s": 300.0,
        "tool_share": 0.5,
        "prompt_per_output": 1.0,
        "first_prompt_tokens": 500.0,
    },
    "serving": {
        "decode_tokens_per_s": 20.0,
        "half_concurrency": 8.0,
        "prefill_tokens_per_s": 2000.0,
        "kv_kept_on_reroute": 0.9,
        "nominal_requests": 4.0,
    },
    "training": {
        "tokens_per_s": 600.0,
        "micro_steps_per_group": 4,
        "update_s": 5.0,
        "pull_s": 2.0,
    },
    "cells": {
        "count": 4,
        "capacity": 8,
        "async_training_cells": 2,
        "to_training_s": 8.52,
        "to_rollout_s": 3.46,
        "decide_every_s": 2.0,
    },
    "batch": {
        "updates": 8,
        "updates_per_burst": 4,
        "queries_per_update": 2,
        "executions_per_query": 4,
        "async_launch": "window",
    },
}


def small_workload(**changes: Any) -> Workload:
    """The small workload with values changed by `part__name`."""
    values = {part: dict(found) for part, found in _VALUES.items()}
    for key, value in changes.items():
        part, name = key.split("__")
        values[part][name] = value
    names = [f"{part}.{name}" for part, found in values.items() for name in found]
    if "hung_share" not in values["durations"]:
        names.append("durations.hung_share")
    values["durations"]["kind"] = "lognormal"
    sources = {name: {"origin": "assumed", "note": "a test"} for name in names}
    return Workload.model_validate({"name": "small", **values, "sources": sources})


@pytest.fixture
def small() -> Workload:
    """The small workload as it is."""
    return small_workload()
