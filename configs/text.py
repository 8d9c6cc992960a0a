"""YAML as settings are written in it: no key twice, ``none`` for no value, nothing huge."""

from __future__ import annotations

from typing import Any

import yaml

NODE_LIMIT = 10_000


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice; plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a text or a number", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """The value of a YAML document, sharing nothing between its parts.

    Raises:
        yaml.YAMLError: it is not YAML, or gives a key twice.
        ValueError: it holds more than ``NODE_LIMIT`` values (a few nested aliases can make
            billions), or one within another hundreds of times.
    """
    try:
        return _Copy().of(_load(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _load(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (LookupError, AttributeError, TypeError):
        # What PyYAML's constructors do with "!!bool 3" or "!!timestamp x".
        raise ValueError("a value is not what its tag (!!...) says") from None


class _Copy:
    """Copies a tree, counting what it has seen, with None for ``none``."""

    def __init__(self) -> None:
        self._nodes = 0

    def of(self, value: Any) -> Any:
        self._nodes += 1
        if self._nodes > NODE_LIMIT:
            raise ValueError(f"more than {NODE_LIMIT} values")
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.of(item) for item in value]
        return None if value == "none" else value
