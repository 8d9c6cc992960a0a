"""Fields of request bodies, read within bounds; what is wrong is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import orjson

from cells.gateway.forms import RefusedError, Tool
from cells.gateway.seen import Seen

STOPS = 16
STOP_LENGTH = 256
SEEDS = 1 << 63
POLICY = "policy"


def load(body: bytes, history: str, seen: Seen) -> dict[str, Any]:
    """The object in a body.

    Args:
        history: name of the list that grows from body to body.

    Raises:
        RefusedError: 400, no JSON (nesting beyond 1,024 levels counts as none) or no object.
    """
    try:
        data = seen.bodies.parse(body, history)
    except orjson.JSONDecodeError as error:
        raise bad(f"the body is not JSON: {error}", None) from None
    if not isinstance(data, dict):
        raise bad("the body must be an object", None)
    return data


def bad(message: str, param: str | None) -> RefusedError:
    """The error for a field that can't be read."""
    text = message if param is None else f"{param}: {message}"
    return RefusedError(400, "invalid_value", text, param=param)


def unserved(message: str, param: str) -> RefusedError:
    """The error for something that exists in the dialect but not here."""
    return RefusedError(400, "unsupported_value", f"{param}: {message}", param=param)


def listed(data: dict[str, Any], name: str) -> list[Any]:
    """A list that may be absent."""
    value = data.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad("must be a list", name)
    return value


def some(data: dict[str, Any], name: str) -> list[Any]:
    """A list with at least one item."""
    value = data.get(name)
    if not isinstance(value, list) or not value:
        raise bad("a non-empty list is needed", name)
    return value


def entry(item: Any, where: str) -> dict[str, Any]:
    """An item that must be an object."""
    if not isinstance(item, dict):
        raise bad("must be an object", where)
    return item


def text(item: dict[str, Any], name: str, where: str) -> str:
    """A text that must be there."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad("must be a text", f"{where}.{name}")
    return value


def maybe_text(item: dict[str, Any], name: str, default: str = "") -> str:
    """A text, or the default for anything else."""
    value = item.get(name)
    return value if isinstance(value, str) else default


def model(data: dict[str, Any]) -> str:
    """Any model name is accepted, and answered with."""
    return maybe_text(data, "model", POLICY)


def whole(data: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number within bounds, or None where there is none."""
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad(f"must be a whole number from {low} to {high}", name)
    return value


def number(data: dict[str, Any], name: str, low: float, high: float) -> float | None:
    """A number within bounds, or None where there is none."""
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad(f"must be a number from {low:g} to {high:g}", name)
    return float(value)


def top_p(data: dict[str, Any]) -> float:
    value = number(data, "top_p", 0, 1)
    if value == 0:
        raise bad("must be above 0", "top_p")
    return 1.0 if value is None else value


def stops(data: dict[str, Any], name: str) -> tuple[str, ...]:
    """Stop texts: one, a list, or none."""
    value = data.get(name)
    found = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(found, list)
        or len(found) > STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= STOP_LENGTH for stop in found)
    ):
        raise bad(f"must be at most {STOPS} texts of 1 to {STOP_LENGTH} characters", name)
    return tuple(found)


def dumped(value: Any, where: str) -> str:
    """A value as JSON text.

    Raises:
        RefusedError: 400, nested deeper than 254 levels, which nobody's schema is.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise bad("is nested too deeply", where) from None


def schema(value: Any, where: str) -> str:
    """A JSON schema as text."""
    if not isinstance(value, dict):
        raise bad("must be a JSON schema", where)
    return dumped(value, where)


def function(name: str, description: Any, parameters: Any, where: str) -> Tool:
    """A tool in the internal form."""
    if parameters is not None and not isinstance(parameters, dict):
        raise bad("must be a JSON schema", where)
    dumped(parameters, where)
    made: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        made["description"] = description
    made["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": made}


def parts_text(content: Any, kinds: Iterable[str], where: str, *, glue: str = "") -> str:
    """A text, or the texts of a list of parts of the given types.

    Raises:
        RefusedError: 400; images and all else that is no text are named.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad("must be a text or a list of text parts", where)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if not isinstance(kind, str) or kind not in kinds:
            raise unserved(
                f"parts of type {kind!r} can't be read: this policy takes text", f"{where}.{index}"
            )
        texts.append(text(part, "refusal" if kind == "refusal" else "text", f"{where}.{index}"))
    return glue.join(texts)


def object_or_none(text: str) -> dict[str, Any] | None:
    """The JSON object in a text, if it is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
