"""A Qwen3 renderer for policies with a tiny context."""

from __future__ import annotations

from typing import Any

from renderers import RenderedTokens
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer


class TerseConfig(Qwen3RendererConfig):  # type: ignore[misc]
    """Keeps thinking across user turns, so that a bridge never has to render history again."""

    thinking_retention: Any = "all"


class TerseRenderer(Qwen3Renderer):  # type: ignore[misc]
    """Qwen3's turns without the schemas of the tools, which would fill a context of a few hundred
    tokens: the policy is fitted to them. Thinking stays where it was sampled, and no empty
    thinking block is ever added."""

    config_class = TerseConfig

    def __init__(self, tokenizer: Any, config: TerseConfig | None = None) -> None:
        super().__init__(tokenizer, config or TerseConfig())

    @property
    def is_prefix_stable(self) -> bool:
        """Full renders extend one another: nothing in history depends on what follows."""
        return True

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Message ids as Qwen3 has them; ``tools`` is accepted and left out."""
        return super().render(messages, add_generation_prompt=add_generation_prompt)

    def _render_assistant(
        self,
        msg: Any,
        msg_idx: int,
        content: str,
        last_query_index: int,
        is_last: bool,
        **emit: Any,
    ) -> None:
        # Qwen3 shows thinking only after the last user turn and puts an empty block before the
        # last answer. With no user turn before and no last turn, it does neither.
        super()._render_assistant(msg, msg_idx, content, -1, False, **emit)
