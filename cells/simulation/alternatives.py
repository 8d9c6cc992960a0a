"""What the figures would be under other assumptions, one changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from cells.scheduler import POLICY_NAMES
from cells.simulation.compare import Comparison, Spread, compare
from cells.simulation.published import Row, published_figures, row_for
from cells.simulation.report import figure_name, number_range, row_value, spread_value
from cells.simulation.workload import Origin, Source, Workload, load_workload
from configs.workloads import workload_path

_FILE = Path(__file__).with_name("alternatives.yaml")


class Alternative(BaseModel):
    """Other values for a published workload, for all policies or for some alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    workload: str
    settings: dict[str, Any]
    policies: tuple[str, ...] = POLICY_NAMES


@dataclass(frozen=True, slots=True)
class Variation:
    """The figures of a workload as shipped (no alternative) or under an alternative.

    `waits` is, for each fixed split, the share of its training cells' time in which they wait. With
    w of Async and v of streaming, streaming saves 1 - (1 - w)/(1 - v): both train the same work on
    the same cells. `staleness` is the mean of each fixed split, in updates.
    """

    alternative: Alternative | None
    workload: str
    rows: tuple[Row, ...]
    waits: dict[str, Spread]
    staleness: dict[str, Spread]


def alternatives() -> tuple[Alternative, ...]:
    """All of them, from the file beside this module."""
    raw = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return tuple(Alternative.model_validate(entry) for entry in raw)


def compare_alternatives(
    workloads: Iterable[str],
    seeds: Sequence[int],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Variation, ...]:
    """Each workload as shipped, then under each of its alternatives, on the same seeds."""
    found: list[Variation] = []
    for name in workloads:
        shipped = compare(_load(name), seeds, _needed(name), progress)
        found.append(_variation(None, name, shipped))
        for alternative in alternatives():
            if alternative.workload == name:
                changed = _changed(alternative, shipped, progress)
                found.append(_variation(alternative, name, changed))
    return tuple(found)


def alternatives_value(variations: Sequence[Variation]) -> dict[str, Any]:
    """The object that `--assumptions --json` prints; without a name a workload is as shipped."""
    return {
        "variations": [
            {
                "workload": variation.workload,
                "alternative": variation.alternative and variation.alternative.name,
                "settings": variation.alternative.settings if variation.alternative else {},
                "policies": list(variation.alternative.policies) if variation.alternative else [],
                "rows": [row_value(row) for row in variation.rows],
                "training_wait": {name: spread_value(s) for name, s in variation.waits.items()},
                "mean_staleness": {n: spread_value(s) for n, s in variation.staleness.items()},
            }
            for variation in variations
        ]
    }


def alternatives_columns(variation: Variation) -> tuple[str, ...]:
    """The columns of a workload's table: its published figures and the waits."""
    figures = [
        f"{figure_name(row.figure)}, {number_range(row.figure.low, row.figure.high)}"
        for row in variation.rows
    ]
    return (
        "assumption",
        *figures,
        *(f"{name} waits" for name in variation.waits),
    )


def alternatives_rows(variations: Sequence[Variation]) -> list[tuple[str, ...]]:
    """A row for each variation of one workload; a figure out of ten per cent has an exclamation."""
    return [
        (
            variation.alternative.name if variation.alternative else "as shipped",
            *(f"{row.simulated.median:.3f}{'' if row.within else ' !'}" for row in variation.rows),
            *(f"{spread.median:.1%}" for spread in variation.waits.values()),
        )
        for variation in variations
    ]


def _load(name: str) -> Workload:
    return load_workload(workload_path(name))


def _needed(name: str) -> tuple[str, ...]:
    """The policies that the workload's figures speak of."""
    named = {
        p for figure in published_figures() if figure.workload == name for p in figure.policies
    }
    return tuple(policy for policy in POLICY_NAMES if policy in named)


def _changed(
    alternative: Alternative, shipped: Comparison, progress: Callable[[str], None]
) -> Comparison:
    """Simulate the policies that the alternative touches; the others stay as they were."""
    source = Source(origin=Origin.ASSUMED, note=alternative.name)
    workload = shipped.workload.with_values(alternative.settings, source)
    touched = [policy for policy in shipped.outcomes if policy in alternative.policies]
    changed = compare(workload, shipped.seeds, touched, progress)
    outcomes = {**shipped.outcomes, **changed.outcomes}
    return Comparison(workload, shipped.seeds, outcomes, changed.bounds)


def _variation(alternative: Alternative | None, name: str, comparison: Comparison) -> Variation:
    figures = [figure for figure in published_figures() if figure.workload == name]
    splits = [policy for policy in comparison.outcomes if policy.startswith("async")]
    waits = {policy: comparison.training_wait(policy) for policy in splits}
    staleness = {policy: comparison.staleness(policy) for policy in splits}
    rows = tuple(row_for(figure, comparison) for figure in figures)
    return Variation(alternative, name, rows, waits, staleness)
