"""Small answers beside the calls: the list of models, and counted tokens."""

from __future__ import annotations

from typing import Any

import orjson

from cells.gateway.dialects.fields import POLICY

_EPOCH = "1970-01-01T00:00:00Z"


def listed(dialect: str) -> bytes:
    """The list of models. Any other name is served by the same policy."""
    one = _model(dialect, POLICY)
    if dialect == "messages":
        page = {"has_more": False, "first_id": POLICY, "last_id": POLICY}
        return orjson.dumps({"data": [one], **page})
    return orjson.dumps({"object": "list", "data": [one]})


def shown(dialect: str, name: str) -> bytes:
    """One model, of any name."""
    return orjson.dumps(_model(dialect, name))


def counted(dialect: str, tokens: int) -> bytes:
    """Tokens that a request's prompt has."""
    if dialect == "responses":
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})
    return orjson.dumps({"input_tokens": tokens})


def _model(dialect: str, name: str) -> dict[str, Any]:
    if dialect == "messages":
        return {"type": "model", "id": name, "display_name": name, "created_at": _EPOCH}
    return {"id": name, "object": "model", "created": 0, "owned_by": "gyre"}
