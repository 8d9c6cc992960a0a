"""Messages to ids and ids to messages: one renderer over one tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from renderers import create_renderer
from renderers.base import ToolCallParseStatus
from renderers.configs import CustomRendererConfig, config_from_name

from cells.gateway.forms import Message, Tool
from cells.gateway.plain import PlainRenderer
from cells.gateway.tokens import LightTokenizer

log = logging.getLogger(__name__)

_NEXT = "\ue0c1\ue0c2"
"""Stands for whatever comes next: characters that nobody says."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What output ids say. ``calls`` are pairs of a tool's name and its arguments as JSON text."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]


class Codec:
    """Renders, bridges and parses for one policy.

    Args:
        tokenizer: of the policy, as transformers loads it.
        renderer: a name of the ``renderers`` package, an import path ``module:Class``, or
            ``default`` for what the tokenizer's own chat template says.
    """

    def __init__(self, tokenizer: Any, renderer: str) -> None:
        light = hasattr(tokenizer, "backend_tokenizer")
        self._tokenizer = LightTokenizer(tokenizer) if light else tokenizer
        self._renderer = _make_renderer(self._tokenizer, renderer)
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.marks = frozenset(_added_ids(tokenizer))
        """Ids of tokens that are no piece of text."""
        self.marks_show = self._marks_show()
        """Whether only marks change what text belongs to: between two of them, it only grows."""
        self._next = self.encode(_NEXT)
        self.tools_matter = self._probe_tools()
        """Whether the schemas of the tools are part of a prompt."""

    def render(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Prompt ids of a whole history, up to where the assistant begins.

        Raises:
            ValueError: the renderer can't express the history.
        """
        try:
            with self._standing_in() as expand:
                ids = self._renderer.render_ids(
                    _with_values(name_results(messages)),
                    tools=tools or None,
                    add_generation_prompt=True,
                )
                return expand(ids)
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def bridge(
        self, prompt: list[int], output: list[int], new: list[Message], tools: list[Tool]
    ) -> list[int] | None:
        """Prompt ids that extend what was sampled by new messages; None when the renderer can't."""
        try:
            with self._standing_in() as expand:
                bridged = self._renderer.bridge_to_next_turn(
                    prompt, output, new, tools=tools or None
                )
                return None if bridged is None else expand(bridged.token_ids)
        except Exception as error:  # noqa: BLE001  (as above; the call forks instead)
            log.warning("bridge failed: %r", error)
            return None

    def refusal(self, new: list[Message]) -> str:
        """Why ``bridge`` gave none for these messages, for people."""
        policy = getattr(self._renderer, "effective_thinking_retention", "template")
        if not new:
            return "no new message"
        if isinstance(self._renderer, PlainRenderer):
            return "the chat template is not plain"
        if policy == "template":
            return "the renderer has no bridge"
        if policy == "tool_cycle" and any(message["role"] == "user" for message in new):
            return "thinking is dropped when the user says more"
        return "thinking was left open or the turn can't be closed"

    def parse(
        self, output: list[int], prompt: list[int], tools: list[Tool], *, final: bool = True
    ) -> Parsed:
        """The message in output ids.

        Tool calls that can't be read are given back as text, so that the client sees what was said;
        in a partial output (not ``final``) they may still be completed and are left out.
        """
        try:
            parsed = self._renderer.parse_response(
                output, tools=tools or None, prompt_ids=prompt or None
            )
        except Exception as error:  # noqa: BLE001  (a policy can sample anything; parsers are not ours)
            log.warning("output of %d ids can't be parsed: %r", len(output), error)
            return Parsed(_clean(self.decode(output)), None, ())
        good: list[tuple[str, str]] = []
        bad: list[str] = []
        for call in parsed.tool_calls:
            if call.status == ToolCallParseStatus.OK and isinstance(call.name, str):
                good.append((_clean(call.name), _arguments_text(call.arguments)))
            elif final:
                span = call.token_span
                bad.append(call.raw if span is None else self.decode(output[span[0] : span[1]]))
        content = "\n".join(part for part in (parsed.content, *bad) if part)
        return Parsed(_clean(content), _clean(parsed.reasoning_content or "") or None, tuple(good))

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def read_open(
        self, output: list[int], prompt: list[int], tools: list[Tool]
    ) -> tuple[Parsed, str | None]:
        """What an output says that is not at its end, and where text goes that follows it:
        ``content``, ``reasoning_content`` or nowhere, as inside a tool call."""
        parsed = self.parse([*output, *self._next], prompt, tools, final=False)
        if parsed.content.endswith(_NEXT):
            return replace(parsed, content=parsed.content.removesuffix(_NEXT)), "content"
        if (parsed.reasoning or "").endswith(_NEXT):
            reasoning = (parsed.reasoning or "").removesuffix(_NEXT)
            return replace(parsed, reasoning=reasoning), "reasoning_content"
        return parsed, None

    def cut(self, output: list[int], prompt: list[int], text: str) -> int | None:
        """How many of the output's ids say exactly this content, its edges left out; None when it
        ends inside a token, or is something else."""
        low, high = 1, len(output)
        while low < high:
            middle = (low + high) // 2
            said = self.parse(output[:middle], prompt, [], final=False).content
            if len(said.strip()) < len(text):
                low = middle + 1
            else:
                high = middle
        said = self.parse(output[:low], prompt, [], final=False).content
        return low if said.strip() == text else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special tokens added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _marks_show(self) -> bool:
        if isinstance(self._renderer, PlainRenderer):
            return False
        return self._tokenizer.convert_tokens_to_ids("<think>") in self.marks

    @contextmanager
    def _standing_in(self) -> Iterator[Callable[[list[int]], list[int]]]:
        if not isinstance(self._tokenizer, LightTokenizer):
            yield list
            return
        with self._tokenizer.standing_in():
            yield self._tokenizer.expand

    def _probe_tools(self) -> bool:
        tool = {
            "type": "function",
            "function": {"name": "probe", "description": "", "parameters": {"type": "object"}},
        }
        messages: list[Message] = [{"role": "user", "content": "x"}]
        return self.render(messages, [tool]) != self.render(messages, [])


def load_codec(policy: Path, renderer: str) -> Codec:
    """The codec of a policy in a local HF directory.

    Raises:
        OSError, ValueError: no tokenizer there, or no such renderer.
    """
    # Only now: transformers takes a second to import, and with AutoTokenizer, which brings torch,
    # ten. Nearly every policy has its tokenizer in the one file that does not need it.
    if (policy / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader
    return Codec(Loader.from_pretrained(str(policy), local_files_only=True), renderer)


def _make_renderer(tokenizer: Any, name: str) -> Any:
    if name == "default":
        return PlainRenderer(tokenizer)
    custom = CustomRendererConfig(import_path=name) if ":" in name else None
    return create_renderer(tokenizer, custom or config_from_name(name))


def _added_ids(tokenizer: Any) -> list[int]:
    return list(getattr(tokenizer, "added_tokens_decoder", ()))


def name_results(messages: list[Message], before: Sequence[Message] = ()) -> list[Message]:
    """Tool results with the names of their tools, which some templates print: clients give the id
    of the call, and the name is in the turn that made it."""
    names = {
        call["id"]: call["function"]["name"]
        for message in (*before, *messages)
        for call in message.get("tool_calls", ())
        if "id" in call
    }
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool"
        and "name" not in message
        and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _with_values(messages: list[Message]) -> list[Message]:
    """Tool arguments as values where they are JSON objects: templates spell them their own way."""
    result: list[Message] = []
    for message in messages:
        if "tool_calls" in message:
            calls = [
                {**call, "function": {**call["function"], "arguments": _arguments_value(call)}}
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        result.append(message)
    return result


def _arguments_value(call: dict[str, Any]) -> Any:
    text = call["function"]["arguments"]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _arguments_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return _clean(arguments)
    return _clean(json.dumps({} if arguments is None else arguments, ensure_ascii=False))


def _clean(text: str) -> str:
    """Text that UTF-8 can carry: a policy can write half a surrogate pair in a JSON escape."""
    return text.encode("utf-8", "replace").decode("utf-8")
