"""The one way a setting is declared, so that none lacks a description, a unit or bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _switches_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """``yes`` is true in YAML, and pydantic would take true for the number 1."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("must be a number or a text, not a switch")
        return value


def absolute_path(path: str | None) -> str | None:
    """A relative path as that of the folder in which the settings are read first: the processes of
    a run have folders of their own. An address stays as it is.

    Raises:
        ValueError: it begins with the home of a user who is not there.
    """
    if path is None or "://" in path:
        return path
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise ValueError(f"{Path(path).parts[0]} is nobody's home on this machine") from None


def setting(
    default: Any,
    description: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    pattern: str | None = None,
) -> Any:
    """A pydantic field with a description, a unit ("" for a plain choice or name) and bounds.

    Pass ``...`` as the default of a setting that a file must give.
    """
    return Field(
        default,
        description=description,
        ge=ge,
        gt=gt,
        le=le,
        lt=lt,
        min_length=min_length,
        max_length=max_length,
        pattern=pattern,
        json_schema_extra={"unit": unit},
    )
