"""When two messages say the same, whatever a client did to their spelling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import orjson

from cells.gateway.forms import Message

MessageKey = tuple[object, ...]


def message_key(message: Message) -> MessageKey:
    """A hashable form that equal messages share.

    Clients re-serialise tool arguments (spaces, key order, ``1.0`` for ``1``), trim the edges of an
    assistant's text, and drop or shorten its thinking: none of that counts. A tool result belongs
    to the call before it, so its id is left out.
    """
    role = message["role"]
    if role != "assistant":
        return (role, message["content"])
    calls = tuple(
        (call["function"]["name"], arguments_key(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
    return (role, message["content"].strip(), calls)


def same(one: Message, other: Message) -> bool:
    """Whether two messages are equal in canonical form."""
    return one == other or message_key(one) == message_key(other)


def first_difference(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Index of the first message that differs; the shorter length when one begins the other."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if not same(left, right):
            return index
    return min(len(one), len(other))


@lru_cache(maxsize=256)  # each reply is looked at three times: as sampled, as matched, as echoed
def arguments_key(text: str) -> str:
    """Tool arguments compared as JSON values; a text that is no JSON compares as it is."""
    try:
        return json.dumps(_plain(json.loads(text)), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def tools_key(tools: Sequence[Any]) -> str:
    """Tools compared as JSON values, in order: a digest that equal ones share.

    Raises:
        ValueError: they are nested too deeply.
    """
    try:
        text = orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"tools: {error}") from None
    return digest(text) if tools else ""


def digest(data: bytes) -> str:
    """A short name for bytes; equal names are equal bytes for all purposes."""
    return blake2b(data, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
