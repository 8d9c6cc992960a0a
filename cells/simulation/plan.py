"""A plan: how many cells of what size, which split, and what elastic scheduling would gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from cells.scheduler import make_policy
from cells.simulation.compare import Spread
from cells.simulation.engine import simulate
from cells.simulation.workload import Origin, Source, Workload

_BYTES_PER_PARAMETER = 16
"""bf16 weights and gradients, fp32 master weights and two moments: mixed-precision Adam as counted
by Rajbhandari et al., ZeRO, 2020."""
_FLOPS_PER_PARAMETER = 8
"""Two for a forward, four for a backward, two for the recomputed forward, for each token (Narayanan
et al., Efficient Large-Scale Language Model Training, 2021)."""
_MEMORY_IN_USE = 0.8
"""The rest is left to activations, buffers and fragmentation."""
_BURSTS = 2
"""Gains do not depend on the length of a run, so that a plan simulates no more than this."""
_MOST_CELLS = 64
_MOST_SPLITS = 8


class PlanError(ValueError):
    """Nothing fits; the text says what would be needed."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs and the model.

    Parameters in billions; memory in GB of a GPU; dense bf16 TFLOP/s of a GPU and the share of
    them that training reaches; output tokens/s that a GPU reaches when full; KV bytes of a token.
    """

    gpus: int
    parameters_b: float
    active_parameters_b: float
    memory_gb: float = 80.0
    tflops: float = 989.0
    utilisation: float = 0.35
    decode_tokens_per_s: float = 1000.0
    kv_bytes_per_token: float = 100_000.0
    context_tokens: float = 100_000.0


@dataclass(frozen=True, slots=True)
class Option:
    """One way to divide the GPUs; hours are medians over seeds, under the elastic policy."""

    cells: int
    gpus_per_cell: int
    capacity: int
    hours_per_update: float
    over_colocate: Spread | None
    over_async: Spread | None
    async_training_cells: int | None

    @property
    def gain(self) -> float:
        """Over the better of the two baselines; 1 where there is a single cell."""
        gains = [spread.median for spread in (self.over_colocate, self.over_async) if spread]
        return min(gains, default=1.0)


def plan(
    hardware: Hardware,
    workload: Workload,
    seeds: Sequence[int],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Option, ...]:
    """Every division of the GPUs into equal cells that can each host a replica, fastest first.

    The workload gives durations, calls and batch; the hardware replaces speeds and cells. The
    fixed split of Async is the best of those tried.

    Raises:
        PlanError: if all GPUs together cannot host a replica.
    """
    sizes = cell_sizes(hardware)
    options = []
    for size in sizes:
        options.append(_option(hardware, workload, size, seeds))
        progress(f"{hardware.gpus // size} cells of {size} GPUs")
    return tuple(sorted(options, key=lambda option: option.hours_per_update))


def cell_sizes(hardware: Hardware) -> tuple[int, ...]:
    """Divisors of the number of GPUs that hold a replica with its optimizer, smallest first.

    Raises:
        PlanError: if there is none.
    """
    per_gpu = hardware.memory_gb * _MEMORY_IN_USE
    least = ceil(hardware.parameters_b * _BYTES_PER_PARAMETER / per_gpu)
    sizes = [
        size
        for size in range(least, hardware.gpus + 1)
        if hardware.gpus % size == 0
        and hardware.gpus // size <= _MOST_CELLS
        and _capacity(hardware, size) >= 1
    ]
    if not sizes:
        raise PlanError(
            f"a replica of {hardware.parameters_b:g}B parameters and the KV cache of one context "
            f"need at least {least} GPUs of {hardware.memory_gb:g} GB; there are {hardware.gpus}"
        )
    return tuple(sizes)


def _capacity(hardware: Hardware, size: int) -> int:
    """Executions whose contexts fit beside the weights of a serving cell."""
    free_gb = size * hardware.memory_gb * _MEMORY_IN_USE - 2 * hardware.parameters_b
    return int(free_gb * 1e9 / (hardware.kv_bytes_per_token * hardware.context_tokens))


def workload_on(hardware: Hardware, workload: Workload, size: int) -> Workload:
    """The workload on cells of `size` GPUs, by a roofline of the hardware."""
    flops = size * hardware.tflops * 1e12 * hardware.utilisation
    alone = workload.serving.decode_tokens_per_s
    capacity = _capacity(hardware, size)
    half = max(1.0, size * hardware.decode_tokens_per_s / alone)
    changes: dict[str, dict[str, float]] = {
        "serving": {
            "half_concurrency": half,
            "prefill_tokens_per_s": flops / (2 * hardware.active_parameters_b * 1e9),
        },
        "training": {
            "tokens_per_s": flops / (_FLOPS_PER_PARAMETER * hardware.active_parameters_b * 1e9),
        },
        "cells": {"count": hardware.gpus // size, "capacity": capacity, "async_training_cells": 1},
    }
    data = workload.model_dump()
    batch = workload.batch
    data["batch"]["updates"] = min(batch.updates, _BURSTS * batch.updates_per_burst)
    source = Source(origin=Origin.ASSUMED, note="roofline of the planned hardware").model_dump()
    for part, values in changes.items():
        data[part].update(values)
        data["sources"].update({f"{part}.{name}": source for name in values})
    return Workload.model_validate(data)


def _option(hardware: Hardware, workload: Workload, size: int, seeds: Sequence[int]) -> Option:
    planned = workload_on(hardware, workload, size)
    count = planned.cells.count
    elastic = _hours(planned, "elastic", seeds)
    if count == 1:
        median = Spread.over(elastic).median
        return Option(1, size, planned.cells.capacity, median, None, None, None)
    split, fixed = min(
        ((cells, _hours(planned, "async", seeds, cells)) for cells in _splits(count)),
        key=lambda tried: Spread.over(tried[1]).median,
    )
    return Option(
        cells=count,
        gpus_per_cell=size,
        capacity=planned.cells.capacity,
        hours_per_update=Spread.over(elastic).median,
        over_colocate=_ratio(_hours(planned, "colocate", seeds), elastic),
        over_async=_ratio(fixed, elastic),
        async_training_cells=split,
    )


def _splits(count: int) -> tuple[int, ...]:
    """Numbers of training cells to try, evenly spread over the possible ones."""
    step = max(1, (count - 1) // _MOST_SPLITS)
    return tuple(range(1, count, step))


def _hours(
    workload: Workload, name: str, seeds: Sequence[int], training_cells: int | None = None
) -> list[float]:
    settings = {"training_cells": training_cells} if training_cells else {}
    policy = make_policy(name, **settings)
    return [simulate(workload, policy, seed).hours / workload.batch.updates for seed in seeds]


def _ratio(slower: Sequence[float], faster: Sequence[float]) -> Spread:
    return Spread.over(slow / fast for slow, fast in zip(slower, faster, strict=True))
