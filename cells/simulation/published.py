"""The published comparisons, and what the simulator says to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from cells.simulation.compare import Comparison, Spread, compare
from cells.simulation.workload import Origin, Workload, load_workload
from configs.workloads import workload_path

_FIGURES = Path(__file__).with_name("figures.yaml")
TOLERANCE = 0.10


class Kind(StrEnum):
    """What a published figure measures."""

    HOURS = "hours"
    GAIN = "gain"
    """Hours of the baseline over hours of elastic."""
    SAVED = "saved"
    """Share of Async's hours that streaming takes off."""
    BEYOND_4H = "beyond_4h"
    """Share of queries that ran for at least four hours."""
    TIMED_OUT_BEYOND_4H = "timed_out_beyond_4h"
    """Among those, the share whose longest execution ended in the timeout."""


class Figure(BaseModel):
    """One published figure; `fitted` if a parameter of its workload was fitted to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workload: str
    kind: Kind
    baseline: str
    low: float
    high: float
    fitted: bool

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that have to be simulated for it."""
        if self.kind is Kind.GAIN:
            return (self.baseline, "elastic")
        if self.kind is Kind.SAVED:
            return ("async", "async_streaming")
        return (self.baseline,)


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure beside the simulated one: median over seeds, lowest and highest."""

    figure: Figure
    name: str
    simulated: Spread
    limit: float | None
    chosen: tuple[str, ...]
    """Parameters that were settled with the figures in view and on which this one depends."""

    @property
    def off(self) -> float:
        """Relative distance of the median from the published range; zero inside of it."""
        value, figure = self.simulated.median, self.figure
        if value < figure.low:
            return value / figure.low - 1
        return max(value / figure.high - 1, 0.0)

    @property
    def within(self) -> bool:
        """Whether the median is within ten per cent of the published range."""
        return abs(self.off) <= TOLERANCE


def published_figures() -> tuple[Figure, ...]:
    """All of them, from the file beside this module."""
    raw = yaml.safe_load(_FIGURES.read_text(encoding="utf-8"))
    return tuple(Figure.model_validate(entry) for entry in raw)


def published_workloads() -> dict[str, Workload]:
    """The workloads of the figures by name, in the order of the figures."""
    names = dict.fromkeys(figure.workload for figure in published_figures())
    return {name: load_workload(workload_path(name)) for name in names}


def compare_published(
    seeds: Sequence[int], progress: Callable[[str], None] = lambda _: None
) -> tuple[tuple[Row, ...], tuple[Comparison, ...]]:
    """Simulate every published workload and set the figures side by side."""
    comparisons = {
        name: compare(workload, seeds, progress=progress)
        for name, workload in published_workloads().items()
    }
    rows = tuple(row_for(figure, comparisons[figure.workload]) for figure in published_figures())
    return rows, tuple(comparisons.values())


def row_for(figure: Figure, comparison: Comparison) -> Row:
    """The simulated value of a figure."""
    limit = None
    if figure.kind is Kind.HOURS:
        simulated = comparison.hours(figure.baseline)
    elif figure.kind is Kind.GAIN:
        simulated = comparison.ratio(figure.baseline, "elastic")
        limit = comparison.colocate_limit if figure.baseline == "colocate" else None
    elif figure.kind is Kind.SAVED:
        assert comparison.saved_by_streaming is not None
        simulated = comparison.saved_by_streaming
    elif figure.kind is Kind.BEYOND_4H:
        simulated = comparison.query_share_beyond("elastic", 4 * 3600)
    else:
        simulated = comparison.timed_out_share_beyond("elastic", 4 * 3600)
    chosen = _chosen(figure, comparison.workload)
    return Row(figure, comparison.workload.name, simulated, limit, chosen)


def _chosen(figure: Figure, workload: Workload) -> tuple[str, ...]:
    chosen = workload.of_origin(Origin.CHOSEN)
    if any(policy.startswith("async") for policy in figure.policies):
        return chosen
    return tuple(name for name in chosen if not name.split(".")[1].startswith("async"))
