"""What a sweep runs: each point of a grid of settings with each seed, checked before any work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product

from pydantic import BaseModel, ConfigDict, Field

from configs.load import ConfigError, load_config
from configs.run import RunConfig
from storage.copies import local_copy
from storage.objects import Store
from storage.records import Record
from storage.run import Run

MOST_RUNS = 256
"""Of one sweep. Each is a training of its own."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
_ROLLOUT = ("model", "warm_start", "problems", "harness", "rollout", "scoring", "debug")
"""Sections of the settings that decide what a rollout is and what it is worth."""


class Axis(BaseModel):
    """A setting that is varied."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str = Field(
        description="Dotted name of a setting, for example trajectory.cap.",
        pattern=r"^[a-z_0-9]+(\.[a-z_0-9]+)*$",
        max_length=128,
    )
    values: tuple[str, ...] = Field(
        description="Its values, each as in a file: 3, none, gspo, 1e-5.",
        min_length=1,
        max_length=64,
    )


class Point(Record):
    """A choice of values, one for each axis."""

    values: tuple[str, ...]
    label: str


class PointRun(Record):
    """The training of a point with a seed."""

    run_id: str
    point: int
    """Which of the plan's points."""
    seed: int


class SweepPlan(Record):
    """A sweep, fixed before its first run."""

    name: str
    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    runs: tuple[PointRun, ...]
    """Seed by seed, so that a sweep that is stopped has whole comparisons."""
    from_run: str | None
    """The run whose first rollouts and verdicts all points train their first step on."""


def plan_key(name: str) -> str:
    """Where the plan of a sweep is kept."""
    return f"sweeps/{name}/plan.json"


def page_key(name: str) -> str:
    """Where the page of a sweep is kept."""
    return f"sweeps/{name}/report.html"


def axis(text: str) -> Axis:
    """An axis from ``key=value,value``. Commas inside brackets, braces and quotes do not part.

    Raises:
        ConfigError: it is not written like that.
    """
    key, separator, values = text.partition("=")
    try:
        if not separator:
            raise ValueError("no =")
        return Axis(key=key.strip(), values=tuple(_parted(values)))
    except ValueError:
        raise ConfigError(
            f"--param {text!r}: write it as dotted.key=value,value, for example "
            f"--param trajectory.cap=1,2,5,none"
        ) from None


def make_plan(
    name: str,
    axes: Sequence[Axis],
    seeds: int,
    base: str,
    overrides: Sequence[str],
    root: str,
    source: Run | None = None,
) -> tuple[SweepPlan, dict[str, RunConfig]]:
    """The plan, and the checked settings of each of its runs by name.

    Args:
        seeds: how many; the settings' own seed and those after it.
        base: preset or path of a file; not looked at with a source.
        overrides: settings of all points, each ``dotted.key=value``.
        source: a run whose first step all points share; its settings are the base.

    Raises:
        ConfigError: a point's settings can't be used; the text names all such points.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"sweep {name!r}: a name has up to 41 small letters, digits, dashes; no dash first"
        )
    keys = [one.key for one in axes]
    if len(set(keys)) != len(keys) or "seed" in keys or "storage.root" in keys:
        raise ConfigError(
            f"parameters {', '.join(keys)}: each once, and neither seed (there is --seeds) nor "
            f"storage.root"
        )
    count = seeds
    for one in axes:
        count *= len(one.values)
    if not 1 <= count <= MOST_RUNS or (not axes and seeds < 2):
        raise ConfigError(
            f"{count} runs: a sweep varies a parameter or has several seeds, and has at most "
            f"{MOST_RUNS} runs"
        )
    file = base if source is None else str(local_copy(source.store, source.layout.config))
    fixed = [*overrides, f"storage.root={root}"]
    first = load_config(file, fixed).seed
    points = tuple(
        Point(values=values, label=_label(keys, values))
        for values in product(*(one.values for one in axes))
    )
    runs: list[PointRun] = []
    configs: dict[str, RunConfig] = {}
    wrong: list[str] = []
    for seed in range(first, first + seeds):
        for number, point in enumerate(points):
            run = PointRun(run_id=f"{name}-{number}-s{seed}", point=number, seed=seed)
            varied = [f"{key}={value}" for key, value in zip(keys, point.values, strict=True)]
            try:
                config = load_config(file, [*fixed, *varied, f"seed={seed}"])
                if source is not None:
                    _same_rollouts(config, source)
            except ConfigError as error:
                if seed == first:
                    wrong.append(f"{point.label}: {error}")
                continue
            if config in configs.values():
                wrong.append(f"{point.label}: the same settings as another point")
            configs[run.run_id] = config
            runs.append(run)
    if wrong:
        raise ConfigError(
            f"sweep {name}: {len(wrong)} of {len(points)} points can't be run\n" + "\n".join(wrong)
        )
    return (
        SweepPlan(
            name=name,
            axes=tuple(axes),
            points=points,
            seeds=tuple(range(first, first + seeds)),
            runs=tuple(runs),
            from_run=None if source is None else source.run_id,
        ),
        configs,
    )


def keep_plan(store: Store, plan: SweepPlan) -> None:
    """Record the plan; a sweep of that name goes on when it is the same.

    Raises:
        ConfigError: there is another one of that name.
    """
    key = plan_key(plan.name)
    if not store.write_record_once(key, plan) and store.read_record(key, SweepPlan) != plan:
        raise ConfigError(
            f"sweep {plan.name} exists with other points, seeds or source: take another name, or "
            f"start it with the same ones to go on with it"
        )


def _same_rollouts(config: RunConfig, source: Run) -> None:
    other = [one for one in _ROLLOUT if getattr(config, one) != getattr(source.config, one)]
    if other:
        raise ConfigError(
            f"differs from run {source.run_id} in {', '.join(other)}: its first step can only be "
            f"shared by points with the same rollouts and verdicts. Leave --from-run out"
        )


def _label(keys: Sequence[str], values: Sequence[str]) -> str:
    names = [key.rpartition(".")[2] for key in keys]
    shown = names if len(set(names)) == len(names) else list(keys)
    parts = [f"{key} {value}" for key, value in zip(shown, values, strict=True)]
    return ", ".join(parts) or "all"


def _parted(text: str) -> Iterable[str]:
    depth, quote, part = 0, "", ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not depth and not quote:
            yield part.strip()
            part = ""
        else:
            part += character
    yield part.strip()
