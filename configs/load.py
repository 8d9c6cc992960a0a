"""Merging of a preset, a file, the environment and ``--set`` into one checked configuration."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.run import RunConfig
from configs.schema import section_of
from configs.text import parse

PRESETS = Path(__file__).parent / "presets"
ENVIRONMENT_PREFIX = "GYRE_SET_"
FILE_LIMIT_BYTES = 1 << 20
_SHOWN_CHARACTERS = 120


class ConfigError(ValueError):
    """A configuration that can't be used; the text names file, key, value and what is allowed."""


def preset_names() -> list[str]:
    """Names that ``load_config`` accepts without a path."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_config(
    source: str | Path = "quickstart",
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> RunConfig:
    """The configuration of ``source``, then the environment over it, then ``overrides`` over both.

    Args:
        source: a preset's name or the path of a YAML file. A file may name the preset (or file)
            that it changes in a top-level key ``preset``.
        overrides: texts ``dotted.key=value``; the value is read as YAML.
        environment: variables ``GYRE_SET_DOTTED__KEY=value`` (two underscores for a dot);
            ``os.environ`` when left out.

    Raises:
        ConfigError: for a missing file, a syntax error, an unknown key or a value out of bounds.
    """
    path, data = _read_chain(source)
    origins: dict[str, str] = {}
    env = os.environ if environment is None else environment
    for name in sorted(env):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            origins[key] = f"environment variable {name}"
            _set(data, key, env[name], origins[key])
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"--set {text!r}: write it as dotted.key=value, for example --set trajectory.cap=3"
            )
        origins[key] = f"--set {text}"
        _set(data, key, value, origins[key])
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(path, error, origins)) from None


def absolute_source(source: str) -> str:
    """What means the same in every folder: a preset's name as it is, a file as an absolute path."""
    path = Path(source)
    return str(path.absolute()) if path.is_file() else source


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML that ``load_config`` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_chain(source: str | Path) -> tuple[Path, dict[str, Any]]:
    """The settings of a file over those of the preset that it names, and so on down."""
    path, data = _read(source)
    chain = [path.resolve()]
    below = data.pop("preset", None)
    while below is not None:
        found, settings = _read(_beside(chain[-1], str(below)))
        lower = found.resolve()
        if lower in chain:
            names = " -> ".join(str(file) for file in [*chain, lower])
            raise ConfigError(f"{path}: its presets form a circle: {names}")
        chain.append(lower)
        below = settings.pop("preset", None)
        data = _merged(settings, data)
    return path, data


def _beside(path: Path, below: str) -> str | Path:
    """A file that another one names is looked for in that one's folder first."""
    found = path.parent / below
    return found if found.suffix and found.is_file() else below


def _read(source: str | Path) -> tuple[Path, dict[str, Any]]:
    path = Path(source)
    if not path.suffix and not path.is_file():
        path = PRESETS / f"{source}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"no configuration {str(source)!r}: give one of {', '.join(preset_names())} or the "
            f"path of a YAML file"
        )
    if path.stat().st_size > FILE_LIMIT_BYTES:
        raise ConfigError(f"{path}: larger than {FILE_LIMIT_BYTES} bytes")
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: the top level must be keys and values, got {type(data).__name__}"
        )
    return path, data


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value)
        result[key] = value
    return result


def _set(data: dict[str, Any], key: str, text: str, origin: str) -> None:
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{origin}: the value is not valid YAML: {error}") from None
    *parents, last = key.split(".")
    for parent in parents:
        below = data.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{origin}: {parent!r} is a value, it has no keys below it")
        data = below
    data[last] = value


def _explain(path: Path, error: ValidationError, origins: Mapping[str, str]) -> str:
    items = error.errors()
    lines: list[str] = []
    for item in items:
        location = item["loc"]
        if item["type"] == "too_short" and any(
            other["loc"][: len(location)] == location for other in items if other is not item
        ):
            continue  # a list is short of its wrong entries, which are named themselves
        key = ".".join(str(part) for part in location) or "(whole file)"
        message = item["msg"].removeprefix("Value error, ")
        match item["type"]:
            case "extra_forbidden":
                message = _unknown(location)
            case "missing":
                message = "must be given"
            case "value_error" if not location or isinstance(item["input"], dict):
                pass  # a rule over several settings: its text has the values that matter
            case _:
                message = f"{message}, got {_shown(item['input'])}"
        origin = f" ({origins[key]})" if key in origins else ""
        lines.append(f"  {key}: {message}{origin}")
    return "\n".join([f"{path}: {len(lines)} error(s)", *lines])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _unknown(location: tuple[int | str, ...]) -> str:
    """What is allowed where an unknown key stands, the nearest name first."""
    section: Any = RunConfig
    for part in location[:-1]:
        if isinstance(part, str):
            section = section_of(section.model_fields[part].annotation)
    names = sorted(section.model_fields)
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown key; {hint}allowed here: {', '.join(names)}"
