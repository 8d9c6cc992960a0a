"""Speed of the simulator: 64 cells and 100,000 executions; prints one JSON object.

Seconds are CPU seconds of this process, which other work on the machine does not lengthen much.
Run it with ``python -m tests.benchmarks.simulation``.
"""

from __future__ import annotations

import json
import time
from typing import Any

from cells.scheduler import make_policy
from cells.simulation.engine import simulate
from cells.simulation.workload import Workload, load_workload
from configs.workloads import workload_path

_CELLS = 64
_EXECUTIONS = (25_600, 51_200, 102_400)
_BURST = 6_400


def main() -> None:
    """Simulate elastic cells with more and more executions."""
    sizes = [_measure(executions) for executions in _EXECUTIONS]
    per_event = [size["cpu_seconds"] / size["events"] for size in sizes]
    result = {
        "cells": _CELLS,
        "sizes": sizes,
        "seconds": sizes[-1]["cpu_seconds"],
        "seconds_per_event_last_over_first": per_event[-1] / per_event[0],
    }
    print(json.dumps(result))


def _measure(executions: int) -> dict[str, Any]:
    started = time.process_time()
    outcome = simulate(_workload(executions), make_policy("elastic"), seed=0)
    seconds = time.process_time() - started
    return {
        "executions": len(outcome.executions),
        "events": outcome.events,
        "cpu_seconds": seconds,
        "events_per_cpu_second": outcome.events / seconds,
        "simulated_hours": outcome.hours,
    }


def _workload(executions: int) -> Workload:
    """The 122B workload on more cells, with bursts that fill them."""
    data = load_workload(workload_path("published_122b_nl2repo")).model_dump()
    data["cells"].update(count=_CELLS, capacity=_BURST // _CELLS)
    queries = _BURST // data["batch"]["executions_per_query"]
    bursts = executions // _BURST
    burst = data["batch"]["updates_per_burst"]
    data["batch"].update(updates=bursts * burst, queries_per_update=queries // burst)
    return Workload.model_validate(data)


if __name__ == "__main__":
    main()
