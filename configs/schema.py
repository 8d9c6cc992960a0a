"""The settings as rows: what ``gyre config schema`` prints and ``docs/settings.md`` holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.run import RunConfig


@dataclass(frozen=True)
class SettingRow:
    """One setting.

    ``key`` is the dotted name that ``--set`` takes; ``[]`` stands for an entry of a list.
    ``kind`` is ``number``, ``switch``, ``choice``, ``text`` or ``list``. ``default`` is text as in
    YAML, ``required`` where a file must give the value.
    """

    key: str
    kind: str
    default: str
    unit: str
    allowed: str
    description: str


def setting_rows(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[SettingRow]:
    """All settings below ``model``, in the order of the model."""
    for name, field in model.model_fields.items():
        key = prefix + name
        inner = section_of(field.annotation)
        if inner is not None and not _is_list(field.annotation):
            yield from setting_rows(inner, f"{key}.")
            continue
        yield _row(key, field)
        if inner is not None:
            yield from setting_rows(inner, f"{key}[].")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The group of settings that an annotation holds, alone or as the entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (section_of(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)


def markdown() -> str:
    """The page of all settings, a table for each section."""
    sections: dict[str, list[SettingRow]] = {}
    for row in setting_rows():
        sections.setdefault(row.key.rpartition(".")[0], []).append(row)
    lines = [
        "# Settings",
        "",
        "Written by `gyre config schema --markdown > docs/settings.md`. [Configuration]"
        "(configuration.md) tells how a run gets them.",
    ]
    for section, rows in sections.items():
        lines += ["", f"## {section or 'The run'}", ""]
        lines += ["| setting | default | unit | allowed | meaning |", "|---|---|---|---|---|"]
        lines += [_table_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _table_line(row: SettingRow) -> str:
    cells = (f"`{row.key}`", row.default, row.unit, row.allowed, row.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _row(key: str, field: FieldInfo) -> SettingRow:
    extra = field.json_schema_extra
    unit = extra.get("unit", "") if isinstance(extra, dict) else ""
    return SettingRow(
        key=key,
        kind=_kind(field.annotation),
        default="required" if field.is_required() else _text(field.default),
        unit=str(unit),
        allowed=_allowed(field),
        description=field.description or "",
    )


def _kind(annotation: Any) -> str:
    kinds = [annotation, *get_args(annotation)]
    if _is_list(annotation):
        return "list"
    if bool in kinds:
        return "switch"
    if any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds):
        return "choice"
    return "number" if int in kinds or float in kinds else "text"


def _allowed(field: FieldInfo) -> str:
    """Bounds, choices and form of a value, in words."""
    parts: list[str] = []
    for kind in (field.annotation, *get_args(field.annotation)):
        if kind is bool:
            parts.append("true, false")
        elif isinstance(kind, type) and issubclass(kind, Enum):
            parts.append(", ".join(str(member.value) for member in kind))
    for bound in field.metadata:
        match bound:
            case Ge(ge=low):
                parts.append(f">= {_text(low)}")
            case Gt(gt=low):
                parts.append(f"> {_text(low)}")
            case Le(le=high):
                parts.append(f"<= {_text(high)}")
            case Lt(lt=high):
                parts.append(f"< {_text(high)}")
            case MinLen(min_length=low) if _is_list(field.annotation):
                parts.append(f"at least {low}")
            case MaxLen(max_length=high) if _is_list(field.annotation):
                parts.append(f"at most {high}")
            case MaxLen(max_length=high):
                parts.append(f"up to {high} characters")
            case _ if getattr(bound, "pattern", None):
                parts.append(f"`{bound.pattern}`")
    if type(None) in get_args(field.annotation):
        parts.append("none")
    return ", ".join(parts)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) in (tuple, list)


def _text(value: Any) -> str:
    """A value as a person writes it in YAML, on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, int | float):
        return f"{value:,}".replace(",", "_") if isinstance(value, int) else f"{value:g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        changed = value.model_dump(mode="json", exclude_unset=True)
        return json.dumps(changed).replace('"', "")
    return str(value)
