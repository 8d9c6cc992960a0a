"""The settings that the Prefect UI asks for when a run is started there, as a form of its own.

A field that is left empty keeps what the preset or the file says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from enum import Enum, StrEnum
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from configs.load import preset_names
from configs.run import RunConfig
from configs.schema import section_of

Preset = StrEnum("Preset", {name: name for name in preset_names()})  # type: ignore[misc]
"""The presets by name: a drop-down in the form."""

_LEAVES = (
    "seed",
    "model.source",
    "model.path",
    "problems.source",
    "problems.path",
    "problems.reward",
    "problems.specrepo.difficulty",
    "harness.name",
    "harness.turns",
    "harness.sub_agents",
    "rollout.queries",
    "rollout.group_size",
    "rollout.limit_s",
    "rollout.concurrent",
    "rollout.sandbox",
    "trajectory.cap",
    "trajectory.within_kind",
    "training.steps",
    "training.updates_per_step",
    "training.learning_rate",
    "training.schedule",
    "training.warmup_updates",
    "training.keep_checkpoints",
    "training.objective.name",
    "training.objective.ratio",
    "training.objective.kl",
    "training.objective.baseline",
    "evaluation.problems",
    "evaluation.samples",
    "evaluation.every",
)
"""What people change from run to run; every other setting goes by its dotted name."""


_MEASURES = ("seconds", "days", "tokens", "share", "kB", "MB", "GB")
"""Units that a description has to name. What is counted says so itself."""


def _tree(keys: tuple[str, ...]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in keys:
        *parents, last = key.split(".")
        below = tree
        for parent in parents:
            below = below.setdefault(parent, {})
        below[last] = None
    return tree


def _without_null(schema: dict[str, Any]) -> None:
    """A plain input for the form: `anyOf` with null would be two inputs and a switch."""
    options = [one for one in schema.pop("anyOf", []) if one.get("type") != "null"]
    if len(options) == 1:
        schema.update({**options[0], **schema})
    elif options:
        schema["anyOf"] = options
    schema.pop("default", None)


def _choice(values: list[Any], schema: dict[str, Any]) -> None:
    """A drop-down that may be left empty: the UI sends null for one that nobody touched, and
    refuses the form where that is no choice."""
    for key in ("anyOf", "$ref", "type", "default"):
        schema.pop(key, None)
    schema["enum"] = [*values, None]


def _leaf(field: FieldInfo) -> tuple[Any, FieldInfo]:
    """The same field, with its bounds and description, that may be left empty."""
    own = deepcopy(field)
    own.default, own.default_factory = None, None
    extra = field.json_schema_extra
    unit = extra.get("unit") if isinstance(extra, dict) else None
    if unit in _MEASURES and unit not in str(field.description):
        own.description = f"{field.description} In {unit}."
    own.json_schema_extra = _without_null
    choices = field.annotation
    if isinstance(choices, type) and issubclass(choices, Enum):
        own.json_schema_extra = partial(_choice, [one.value for one in choices])
    own.validate_default = False
    return field.annotation | None, own  # type: ignore[operator]


def _form(section: type[BaseModel], tree: dict[str, Any], name: str) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for key, below in tree.items():
        field = section.model_fields[key]
        inner = section_of(field.annotation)
        if below is None or inner is None:
            fields[key] = _leaf(field)
        else:
            model = _form(inner, below, f"{name}{key.title().replace('_', '')}")
            fields[key] = (model, Field(default_factory=model, description=field.description))
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


class Settings(_form(RunConfig, _tree(_LEAVES), "Of")):  # type: ignore[misc]
    """Settings over those of the preset or the file; what is left empty is as it is there."""


QUICKSTART = Preset("quickstart")
EMPTY = Settings()


def overrides_of(settings: BaseModel) -> list[str]:
    """The filled fields as texts ``dotted.key=value``, as ``load_config`` takes them."""
    return list(_filled(settings, ""))


def _filled(section: BaseModel, prefix: str) -> Iterator[str]:
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            yield from _filled(value, f"{prefix}{key}.")
        elif value is not None:
            plain = value.value if isinstance(value, Enum) else value
            yield f"{prefix}{key}={json.dumps(plain)}"
