"""OpenAI's responses as a stream of events."""

from __future__ import annotations

import time
from typing import Any

from cells.gateway.dialects.dialect import EventWriter, named_event, pieces
from cells.gateway.dialects.responses_objects import (
    ResponsesRequest,
    call_item,
    custom_input,
    envelope,
    finished,
    message_item,
    reasoning_item,
    text_part,
)
from cells.gateway.forms import Finish, RefusedError, Reply, ToolCall

_RETRIED = "server_error"
"""Clients ask again after this code; of what they do not know they differ."""


class ItemWriter(EventWriter):
    """response.created and response.in_progress, then item by item (added, deltas, done): thinking,
    text, one for each tool call; then response.completed, response.incomplete or response.failed.
    """

    def __init__(self, request: ResponsesRequest, call_id: str) -> None:
        super().__init__()
        self._request = request
        self._call_id = call_id
        self._created = int(time.time())
        self._number = 0
        self._output = -1
        self._open: str | None = None
        self._texts = {"reasoning_content": "", "content": ""}

    def start(self) -> bytes:
        return self._event("response.created", response=self._response()) + self.alive()

    def alive(self) -> bytes:
        # A comment would not do: a client that waits for events counts only those.
        return self._event("response.in_progress", response=self._response())

    def error(self, error: RefusedError) -> bytes:
        code = _RETRIED if error.status >= 500 else error.code
        body = envelope(self._request, self._call_id, self._created, "failed")
        body["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=body)

    def _text(self, field: str, text: str) -> bytes:
        head = self._enter(field)
        self._texts[field] += text
        if field == "content":
            return head + self._event(
                "response.output_text.delta", **self._part(), delta=text, logprobs=[]
            )
        return head + self._event("response.reasoning_text.delta", **self._part(), delta=text)

    def _end(self, reply: Reply) -> bytes:
        parts = [self._leave()]
        parts += [self._call(call) for call in reply.tool_calls]
        body = finished(self._request, reply, self._created)
        kind = "incomplete" if reply.finish is Finish.LENGTH else "completed"
        return b"".join([*parts, self._event(f"response.{kind}", response=body)])

    def _enter(self, field: str) -> bytes:
        """Begin the item of a field, unless it is the one that is open."""
        if self._open == field:
            return b""
        left = self._leave()
        self._open = field
        self._output += 1
        item = self._item("in_progress")
        added = self._event(
            "response.output_item.added", output_index=self._output, item={**item, "content": []}
        )
        part = self._text_part("")
        return left + added + self._event("response.content_part.added", **self._part(), part=part)

    def _leave(self) -> bytes:
        if self._open is None:
            return b""
        text, place, part = self._texts[self._open], self._part(), self._text_part()
        if self._open == "content":
            done = self._event("response.output_text.done", **place, text=text, logprobs=[])
        else:
            done = self._event("response.reasoning_text.done", **place, text=text)
        ended = self._event("response.content_part.done", **place, part=part)
        item = self._item("completed")
        self._open = None
        return (
            done
            + ended
            + self._event("response.output_item.done", output_index=self._output, item=item)
        )

    def _item(self, status: str) -> dict[str, Any]:
        assert self._open is not None
        text = self._texts[self._open]
        if self._open == "content":
            return message_item(self._call_id, text, status)
        return reasoning_item(self._call_id, text)

    def _text_part(self, text: str | None = None) -> dict[str, Any]:
        assert self._open is not None
        text = self._texts[self._open] if text is None else text
        if self._open == "content":
            return text_part(text)
        return {"type": "reasoning_text", "text": text}

    def _part(self) -> dict[str, Any]:
        prefix = "msg" if self._open == "content" else "rs"
        item_id = f"{prefix}_{self._call_id}"
        return {"item_id": item_id, "output_index": self._output, "content_index": 0}

    def _call(self, call: ToolCall) -> bytes:
        self._output += 1
        item = call_item(self._request, call, "")
        place = {"item_id": item["id"], "output_index": self._output}
        if item["type"] == "custom_tool_call":
            kind, field, text = "custom_tool_call_input", "input", custom_input(call.arguments)
        else:
            kind, field, text = "function_call_arguments", "arguments", call.arguments
        parts = [
            self._event("response.output_item.added", output_index=self._output, item=item),
            *(self._event(f"response.{kind}.delta", **place, delta=p) for p in pieces(text)),
            self._event(f"response.{kind}.done", **place, name=item["name"], **{field: text}),
        ]
        item = call_item(self._request, call, call.arguments)
        parts.append(self._event("response.output_item.done", output_index=self._output, item=item))
        return b"".join(parts)

    def _response(self) -> dict[str, Any]:
        return envelope(self._request, self._call_id, self._created, "in_progress")

    def _event(self, kind: str, **body: Any) -> bytes:
        made = named_event({"type": kind, "sequence_number": self._number, **body})
        self._number += 1
        return made
