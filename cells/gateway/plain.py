"""A renderer for policies that only have a chat template."""

from __future__ import annotations

from typing import Any

from renderers import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

_QUESTION = {"role": "user", "content": "Q"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}


class PlainRenderer(DefaultRenderer):  # type: ignore[misc]
    """Renders by the tokenizer's template, and bridges where the template is plain: where turns
    end with the end-of-sequence token and what follows a turn does not depend on what it says.

    A bridge is what the template puts behind a stand-in for the turn. Tool calls and thinking are
    read where the vocabulary has their marks.
    """

    def __init__(self, tokenizer: Any) -> None:
        known = tokenizer.get_vocab()
        super().__init__(
            tokenizer,
            DefaultRendererConfig(
                tool_parser="qwen3" if "<tool_call>" in known else None,
                reasoning_parser="think" if "</think>" in known else None,
            ),
        )
        self._think_end = known.get("</think>")
        self.drops_thinking = self._think_end is not None and self._probe_thinking()
        """Whether the template forgets thinking when the user says more."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """The ids so far and the new messages; None where the template is not plain."""
        eos = self._tokenizer.eos_token_id
        says_more = any(message["role"] == "user" for message in new_messages)
        if self.drops_thinking and says_more and self._think_end in previous_completion_ids:
            return None
        answer: dict[str, Any] = {"role": "assistant", "content": "A"}
        if new_messages and new_messages[0]["role"] == "tool":
            answer["tool_calls"] = [_CALL]
            new_messages = [{**m, "tool_call_id": _CALL["id"]} for m in new_messages]
        opening = [_QUESTION, answer]
        before = self._apply(opening, tools=tools)
        whole = self._apply([*opening, *new_messages], tools=tools, add_generation_prompt=True)
        if whole[: len(before)] != before or eos not in before:
            return None
        closed = len(before) - before[::-1].index(eos)
        rest = whole[closed:]
        if not previous_completion_ids or previous_completion_ids[-1] != eos:
            rest = [eos, *rest]  # the turn was cut off
        return RenderedTokens(token_ids=[*previous_prompt_ids, *previous_completion_ids, *rest])

    def _probe_thinking(self) -> bool:
        thought = {"role": "assistant", "content": "<think>\nR\n</think>\n\nA"}
        return self._think_end not in self._apply([_QUESTION, thought, _QUESTION])
