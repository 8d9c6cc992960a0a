"""Merging of a preset, a file, the environment and ``--set`` into one checked configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.run import RunConfig

PRESETS = Path(__file__).parent / "presets"
ENVIRONMENT_PREFIX = "GYRE_SET_"
FILE_LIMIT_BYTES = 1 << 20


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
    """The configuration of ``source`` with overrides, later ones first in rank.

    Args:
        source: a preset's name or the path of a YAML file. A file may name the preset that it
            changes in a top-level key ``preset``.
        overrides: texts ``dotted.key=value``; the value is read as YAML.
        environment: variables ``GYRE_SET_DOTTED__KEY=value`` (two underscores for a dot);
            ``os.environ`` when left out.

    Raises:
        ConfigError: for a missing file, a syntax error, an unknown key or a value out of bounds.
    """
    path, data = _read(source)
    base = data.pop("preset", None)
    if base is not None:
        _, below = _read(str(base))
        data = _merged(below, data)
    env = os.environ if environment is None else environment
    for name in sorted(env):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _set(data, key, env[name], origin=f"environment variable {name}")
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"--set {text!r}: write it as dotted.key=value, for example --set trajectory.cap=3"
            )
        _set(data, key, value, origin=f"--set {text}")
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from None


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML that ``load_config`` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(source: str | Path) -> tuple[Path, dict[str, Any]]:
    path = Path(source)
    if not path.suffix and not path.exists():
        path = PRESETS / f"{source}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"no configuration {str(source)!r}: give one of {', '.join(preset_names())} or the "
            f"path of a YAML file"
        )
    if path.stat().st_size > FILE_LIMIT_BYTES:
        raise ConfigError(f"{path}: larger than {FILE_LIMIT_BYTES} bytes")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
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
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: the value is not valid YAML: {error}") from None
    if value == "none":
        value = None
    *parents, last = key.split(".")
    for parent in parents:
        below = data.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{origin}: {parent!r} is a value, it has no keys below it")
        data = below
    data[last] = value


def _explain(path: Path, error: ValidationError) -> str:
    lines = [f"{path}: {error.error_count()} error(s)"]
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key; allowed here: {', '.join(_siblings(item['loc']))}"
            lines.append(f"  {key}: {message}")
        elif item["type"] == "value_error":
            lines.append(f"  {key}: {message}")
        else:
            lines.append(f"  {key}: {message}, got {item['input']!r}")
    return "\n".join(lines)


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    """Keys that are allowed beside an unknown one."""
    node: Any = RunConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation = node.model_fields[part].annotation
        arguments = getattr(annotation, "__args__", None)
        node = arguments[0] if arguments else annotation
    return sorted(node.model_fields)
