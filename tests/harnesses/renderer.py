"""The renderer of the policy in these tests."""

from __future__ import annotations

from typing import Any

from renderers import RenderedTokens
from renderers.qwen3 import Qwen3Renderer

from cells.gateway.terse import TerseRenderer


class KeepingRenderer(TerseRenderer):
    """Qwen3's turns with the schemas of the tools, and thinking that stays: every history can be
    extended, so that only what a client does makes a fork."""

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        return Qwen3Renderer.render(
            self, messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
